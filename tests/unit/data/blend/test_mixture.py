from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data.blend.mixture import Mixture
from sparkdl.errors import ParamError

some_weights = st.lists(st.integers(1, 50) | st.floats(0.001, 10), min_size=1, max_size=20)
seeds = st.integers(-(2**70), 2**70)


def lags_after(weights: list[float], drawn: np.ndarray) -> np.ndarray:
    """For each sample and dataset, how far the dataset is behind its share after the sample was drawn."""
    share = np.asarray(weights, float) / np.sum(weights)
    counts = np.cumsum(drawn[:, None] == np.arange(len(weights)), axis=0)
    return np.outer(np.arange(1, len(drawn) + 1), share) - counts


@given(some_weights, seeds)
def test_every_draw_minimizes_the_squared_error(weights: list[float], seed: int) -> None:
    drawn = Mixture(weights, seed=seed).draw(100)
    lags = lags_after(weights, drawn)
    before = lags + (drawn[:, None] == np.arange(len(weights)))
    chosen = np.take_along_axis(before, drawn[:, None], axis=1)[:, 0]
    # Drawing a dataset changes its lag^2 to (lag - 1)^2: the largest lag gains most.
    np.testing.assert_array_less(before.max(axis=1), chosen + 1e-7)


@given(some_weights, seeds)
def test_no_dataset_is_ever_a_whole_sample_ahead_of_its_share(weights: list[float], seed: int) -> None:
    assert lags_after(weights, Mixture(weights, seed=seed).draw(200)).min() > -1


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), seeds, st.integers(1, 4))
def test_counts_are_exact_after_every_round(shares: list[int], seed: int, rounds: int) -> None:
    mixture = Mixture([Fraction(share, 7) for share in shares], seed=seed)
    mixture.draw(rounds * sum(shares))
    assert mixture.drawn == tuple(rounds * share for share in shares)


@given(some_weights, seeds, st.lists(st.integers(0, 60), max_size=6))
def test_sequence_does_not_depend_on_the_portions_in_which_it_is_drawn(
    weights: list[float], seed: int, portions: list[int]
) -> None:
    mixture = Mixture(weights, seed=seed)
    pieces = []
    for portion in portions:
        pieces.append(mixture.draw(portion))
        resumed = Mixture(weights, seed=seed)
        resumed.drawn = mixture.drawn
        mixture = resumed
    whole = Mixture(weights, seed=seed).draw(sum(portions))
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *pieces]), whole)


def test_mixture_from_a_table_equals_the_computed_one() -> None:
    looked_up, computed = Mixture([3, 5, 2], seed=5), Mixture([3, 5, 2 + 1e-12], seed=5)
    np.testing.assert_array_equal(looked_up.draw(100), computed.draw(100))


def test_seed_decides_the_first_of_equally_weighted_datasets() -> None:
    assert {int(Mixture([1, 1, 1], seed=seed).draw(1)[0]) for seed in range(20)} == {0, 1, 2}


def test_decimal_weights_mean_what_they_say() -> None:
    mixture = Mixture([0.7, 0.2, 0.1])
    mixture.draw(10)
    assert mixture.drawn == (7, 2, 1)


def test_changed_weights_keep_the_counts_drawn_and_catch_up() -> None:
    mixture = Mixture([1, 3])
    mixture.drawn = (50, 50)
    assert mixture.draw(100).tolist() == [1] * 100
    mixture.draw(200)
    assert mixture.drawn == (100, 300)


def test_many_datasets_catch_up_after_millions_of_samples_by_other_weights() -> None:
    mixture = Mixture([number**0.5 for number in range(2, 22)])
    mixture.drawn = (10**8, *[10**8] * 18, 0)
    assert mixture.draw(100).tolist() == [19] * 100


def test_hundreds_of_datasets_each_get_their_share() -> None:
    weights = list(range(1, 301))
    drawn = Mixture(weights).draw(1000)
    assert np.abs(lags_after(weights, drawn)).max() < 2


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [1, float("nan")], [float("inf")]])
def test_weights_that_are_not_positive_and_finite_are_refused(weights: list[float]) -> None:
    with pytest.raises(ParamError, match="positive and finite"):
        Mixture(weights)


def test_counts_of_another_number_of_datasets_are_refused() -> None:
    with pytest.raises(ParamError, match="mixture of 2 datasets cannot continue from"):
        Mixture([1, 1]).drawn = (1, 2, 3)


@given(st.floats(0.001, 1000), seeds, st.integers(0, 3000))
def test_each_of_two_datasets_stays_within_half_a_sample_of_its_share(
    weight: float, seed: int, skipped: int
) -> None:
    two = Mixture([1.0, weight], seed=seed)
    two.draw(skipped)
    drawn = two.draw(300)
    share = Fraction(str(weight)) / (1 + Fraction(str(weight)))
    counts = np.cumsum(drawn == 1) + two.drawn[1] - int((drawn == 1).sum())
    for sample, count in zip(range(skipped + 1, skipped + 301), counts.tolist(), strict=True):
        assert abs(share * sample - count) <= Fraction(1, 2) + Fraction(1, 10**6)
