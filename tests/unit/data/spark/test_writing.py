from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data.spark.writing import plan_runs


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 20))
def test_runs_hold_every_file_once_in_order_and_leave_no_two_small_ones_side_by_side(
    sizes: list[int], target: int
) -> None:
    runs = plan_runs(sizes, target)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in run) for run in runs]
    assert all(total <= target for run, total in zip(runs, totals, strict=True) if len(run) > 1)
    for (_, total), (after, _) in itertools.pairwise(zip(runs, totals, strict=True)):
        first_of_next = sizes[after[0]]
        both_small = 2 * total < target and 2 * first_of_next < target
        assert not both_small
