from __future__ import annotations

import pytest

from sparkdl.launch.failures import find_culprit, were_ranks_lost
from sparkdl.launch.wire.outcome import Failure

CAUSE = Failure(rank=2, host="a", error="LookupError: none", traceback="...", pickled=b"x")
CONSEQUENCE = Failure(rank=0, host="b", error="RankLostError: rank 2", traceback="...", is_consequence=True)


SHARED = Failure(rank=0, error="MismatchError: all", traceback="", origin="shared")


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        ([CONSEQUENCE, CAUSE], CAUSE),
        ([CONSEQUENCE, SHARED, CAUSE], CAUSE),
        ([CONSEQUENCE, SHARED], SHARED),
        ([CONSEQUENCE], CONSEQUENCE),
        ([], None),
    ],
)
def test_culprit_is_the_cause_on_one_rank_or_else_an_error_of_all_or_else_a_consequence(
    failures: list[Failure], culprit: Failure | None
) -> None:
    assert find_culprit(failures) is culprit


@pytest.mark.parametrize(
    ("origins", "returned", "num_ranks", "were_lost"),
    [
        (["aborted", "aborted"], [], 2, False),
        (["aborted"], [1], 2, False),
        (["aborted", "lost"], [], 2, True),
        (["late", "aborted"], [], 2, True),
        (["late"], [1], 2, False),
        (["lost"], [1], 2, True),
        (["aborted", ""], [], 3, True),
    ],
)
def test_ranks_count_as_lost_where_some_did_not_report_or_were_lost_to_others(
    origins: list[str], returned: list[int], num_ranks: int, were_lost: bool
) -> None:
    failures = [
        Failure(rank=rank, error="e", traceback="", is_consequence=True, origin=origin)
        for rank, origin in enumerate(origins)
    ]
    assert were_ranks_lost(failures, returned, num_ranks) is were_lost
    killed = Failure(rank=0, error="SIGKILL", traceback="", is_loss=True)
    assert were_ranks_lost([*failures, killed], returned, num_ranks)
