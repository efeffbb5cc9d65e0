from __future__ import annotations

import logging

import pytest

from sparkdl.errors import (
    ClusterLostError,
    ExecutorsLostError,
    LaunchError,
    LinkLostError,
    RankDiedError,
    RankError,
    SlotsMissingError,
)
from sparkdl.launch import Restarts, Start, run_with_restarts

LOST = RankDiedError("Rank 1 on there was lost.\nits last line", rank=1, host="there")
RAISED = RankError("Rank 0 on here failed: ValueError", rank=0, host="here")


def run_through(endings, restarts: Restarts) -> list[int]:
    """Run calls that end as given, without Spark; return the number of ranks of each call."""
    tried = []

    def run(start: Start) -> list[int]:
        assert start.number == len(tried)
        tried.append(start.num_ranks)
        ending = endings[len(tried) - 1] if len(tried) <= len(endings) else None
        if ending is not None:
            raise ending
        return tried

    return run_with_restarts(run, restarts, spark=None, num_ranks=3, where=lambda: "commit 7")


def test_restarts_for_losses_and_retries_for_exceptions_are_counted_separately(caplog):
    restarts = Restarts(max_restarts=2, max_retries=1, min_ranks=3, what="run")
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        assert run_through([LOST, RAISED, ExecutorsLostError("Executors were lost")], restarts) == [3] * 4
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first == (
        "Rank 1 on there was lost. The run continues with 3 of 3 ranks from commit 7: restart 1 of 2."
    )
    assert second.startswith("Rank 0 on here failed: ValueError. ")
    assert second.endswith(": retry 1 of 1.")
    assert third.startswith("Executors were lost. ")
    assert third.endswith(": restart 2 of 2.")


def test_a_cut_connection_is_healed_by_restarts_and_then_by_retries():
    cut = LinkLostError("cut", rank=0, host="here")
    assert run_through([cut] * 3, Restarts(max_restarts=1, max_retries=2, min_ranks=3)) == [3] * 4
    with pytest.raises(LinkLostError):
        run_through([cut] * 4, Restarts(max_restarts=1, max_retries=2, min_ranks=3))


def test_one_loss_or_failure_too_many_is_raised():
    with pytest.raises(RankDiedError):
        run_through([LOST, LOST], Restarts(max_restarts=1, max_retries=5, min_ranks=3))
    with pytest.raises(RankError) as caught:
        run_through([RAISED, RAISED], Restarts(max_restarts=5, max_retries=1, min_ranks=3))
    assert caught.value is RAISED


@pytest.mark.parametrize(
    "error",
    [
        ClusterLostError("the application ended"),
        LaunchError("no such option"),
        SlotsMissingError("none free"),
    ],
)
def test_failure_to_start_the_first_ranks_is_not_retried_and_does_not_try_fewer(error):
    with pytest.raises(type(error)) as caught:
        run_through([error], Restarts(max_restarts=5, max_retries=5, min_ranks=1))
    assert caught.value is error


def test_restart_without_free_slots_tries_fewer_ranks(caplog):
    none_free = SlotsMissingError("0 of the ranks had started")
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        tried = run_through(
            [LOST, none_free, none_free], Restarts(max_restarts=1, min_ranks=1, advice="Lower it.")
        )
    assert tried == [3, 3, 2, 1]
    last = caplog.records[-1].getMessage()
    assert last.startswith("0 of the ranks had started. ")
    assert "The fit continues with 1 of 3 ranks " in last
    assert last.endswith(": still restart 1 of 1.")
    with pytest.raises(SlotsMissingError):
        run_through([LOST, none_free, none_free], Restarts(max_restarts=1, min_ranks=2))
