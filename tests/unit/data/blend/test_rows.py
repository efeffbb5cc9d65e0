"""The plan of an epoch over several corpora, without Spark."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.data import Mixture
from sparkdl.data.blend.rows import plan_shares
from sparkdl.errors import DataError, ParamError

WEIGHTS = {"web": 0.5, "books": 0.3, "code": 0.2}


def epoch_of(shares):
    """Corpus and number of each row of an epoch in order, and the rows that are held out."""
    drawn, held_out = [], []
    for corpus, share in enumerate(shares):
        for number in range(share.num_rows):
            places, is_held_out = share.places(number)
            if is_held_out:
                held_out.append((corpus, number))
            else:
                drawn += [(place, corpus, number) for place in places]
    return [row[1:] for row in sorted(drawn)], held_out


def test_every_row_is_in_an_epoch_and_each_part_of_it_follows_the_weights():
    counts = {"web": 100, "books": 7, "code": 90}
    drawn, held_out = epoch_of(plan_shares(counts, WEIGHTS, seed=3))
    assert not held_out
    assert {
        (corpus, number) for corpus, count in enumerate(counts.values()) for number in range(count)
    } == set(drawn)
    mixture = Mixture(list(WEIGHTS.values()), seed=3)
    mixture.draw(len(drawn))
    corpora = np.array([corpus for corpus, _ in drawn])
    assert tuple(np.bincount(corpora)) == mixture.drawn
    for corpus, weight in enumerate(WEIGHTS.values()):
        counted = np.cumsum(corpora == corpus)
        assert np.abs(counted - weight * np.arange(1, len(drawn) + 1)).max() <= 1
    # Each corpus is used as evenly as possible: the numbers of uses of its rows differ by at most one.
    for corpus in range(3):
        times = np.bincount([number for drawn_corpus, number in drawn if drawn_corpus == corpus])
        assert times.max() - times.min() <= 1


def test_rows_of_a_short_epoch_are_drawn_by_the_seed():
    counts = {"web": 1000, "books": 70, "code": 90}
    drawn, again, other = (
        epoch_of(plan_shares(counts, WEIGHTS, num_rows=100, seed=seed))[0] for seed in (1, 1, 2)
    )
    assert drawn == again
    assert drawn != other
    assert np.bincount([corpus for corpus, _ in drawn]).tolist() == [50, 30, 20]
    assert len(set(drawn)) == 100


def test_validation_rows_occur_once_and_are_not_trained_on():
    counts = {"web": 50, "books": 10, "code": 40}
    drawn, held_out = epoch_of(plan_shares(counts, WEIGHTS, held_out=0.2, seed=1))
    assert np.bincount([corpus for corpus, _ in held_out]).tolist() == [10, 2, 8]
    assert len(set(held_out)) == 20
    assert not set(held_out) & set(drawn)
    assert len(set(held_out) | set(drawn)) == 100


def test_epoch_without_rows_of_a_corpus_or_with_too_many_rows_is_refused():
    with pytest.raises(DataError, match="'code' has a weight of 0.2, and no rows"):
        plan_shares({"web": 1, "books": 1}, WEIGHTS)
    with pytest.raises(ParamError, match="1000000 .* 101: 'b' has 1"):
        plan_shares({"a": 100, "b": 1}, {"a": 0.999999, "b": 1e-6})
