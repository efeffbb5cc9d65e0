"""The rows of each rank that follow from the speeds of the ranks."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.training.balance import StragglerWatch, rows_by_speed

paces = st.floats(1e-6, 1e3)


@pytest.mark.parametrize(
    ("seconds_per_row", "num_rows", "rows"),
    [
        ([1.0, 2.0], 48, [32, 16]),
        ([2.0, 2.0, 2.0, 2.0], 10, [3, 3, 2, 2]),
        ([1.0, 1e6], 48, [47, 1]),
        ([1.0, 1e6, 1e6], 3, [1, 1, 1]),
        ([5.0], 7, [7]),
        ([0.001, 0.001, 0.004], 90, [40, 40, 10]),
    ],
)
def test_rows_are_inverse_to_the_seconds_per_row_with_one_row_at_least(seconds_per_row, num_rows, rows):
    assert rows_by_speed(seconds_per_row, num_rows) == rows


@given(seconds_per_row=st.lists(paces, min_size=1, max_size=9), more=st.integers(0, 500))
def test_all_rows_are_divided_and_a_faster_rank_has_no_fewer(seconds_per_row, more):
    rows = rows_by_speed(seconds_per_row, len(seconds_per_row) + more)
    assert sum(rows) == len(seconds_per_row) + more
    assert min(rows) >= 1
    for one, other in product(zip(seconds_per_row, rows, strict=True), repeat=2):
        assert one[0] <= other[0] or one[1] <= other[1] + 1


@given(seconds_per_row=st.lists(paces, min_size=2, max_size=3), more=st.integers(0, 12))
def test_no_other_division_ends_earlier(seconds_per_row, more):
    num_rows = len(seconds_per_row) + more
    divisions = (
        rows for rows in product(range(1, num_rows + 1), repeat=len(seconds_per_row)) if sum(rows) == num_rows
    )

    def slowest_s(rows):
        return max(count * seconds for count, seconds in zip(rows, seconds_per_row, strict=True))

    best = min(map(slowest_s, divisions))
    assert slowest_s(rows_by_speed(seconds_per_row, num_rows)) == pytest.approx(best)


def test_a_rank_is_named_once_it_was_slow_for_long_without_interruption():
    watch = StragglerWatch(factor=2.0, seconds=5.0)
    slow, quick = [1.0, 1.1, 2.5], [1.0, 1.1, 1.9]
    assert watch.observe(slow, 4.0) == {}
    assert watch.observe(quick, 4.0) == {}
    assert watch.observe(slow, 4.0) == {}
    assert watch.observe(slow, 4.0) == {2: pytest.approx(2.5 / 1.05)}
    assert watch.observe(slow, 4.0) == {}  # it is named already
    watch.observe(quick, 1.0)
    assert watch.observe(slow, 6.0).keys() == {2}


def test_a_rank_may_be_named_at_the_first_measurement():
    assert StragglerWatch(factor=2.0, seconds=0.0).observe([1.0, 1.0, 9.0], 2.0).keys() == {2}


def test_of_two_ranks_the_slower_one_is_the_straggler():
    assert StragglerWatch(factor=2.0, seconds=1.0).observe([3.0, 1.0], 2.0) == {0: 3.0}
