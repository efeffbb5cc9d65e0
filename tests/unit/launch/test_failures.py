from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from sparkdl.errors import (
    HangError,
    LaunchCancelledError,
    LaunchError,
    LinkLostError,
    RankDiedError,
    RankError,
    SparkdlError,
)
from sparkdl.launch.failures import (
    find_culprit,
    link_error,
    raise_for_failures,
    rank_error,
    renumber_rank,
    were_ranks_lost,
)
from sparkdl.launch.wire.messages import pack_error
from sparkdl.launch.wire.outcome import Failure
from sparkdl.launch.wire.spec import HangLimits

CAUSE = Failure(rank=2, host="a", error="LookupError: none", traceback="...", pickled=b"x")
CONSEQUENCE = Failure(rank=0, host="b", error="RankLostError: rank 2", traceback="...", is_consequence=True)


RAISED = Failure(rank=0, host="a", error="LookupError: none", traceback="")
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
    ("failures", "reported"),
    [
        ([], "cannot be started"),
        ([CONSEQUENCE], "cannot be started"),
        ([CONSEQUENCE, replace(CAUSE, pickled=b"")], "LookupError: none"),
    ],
)
def test_a_task_that_could_not_start_its_rank_is_reported_before_what_followed_from_it(
    failures: list[Failure], reported: str
) -> None:
    stage: Any = SimpleNamespace(spark=None, num_ranks=3)
    limits = HangLimits(hang_timeout_s=1.0, operation_timeout_s=1.0, silence_timeout_s=1.0)
    with pytest.raises(SparkdlError, match=reported):
        raise_for_failures(failures, LaunchError("the program cannot be started"), stage, limits)


@pytest.mark.parametrize(
    ("failure", "was_cancelled_here", "error"),
    [
        (replace(RAISED, is_loss=True), False, LaunchCancelledError),
        (replace(RAISED, is_loss=True), True, RankDiedError),
        (RAISED, False, RankError),
    ],
)
def test_cancellation_in_spark_is_reported_unless_the_driver_asked_for_it_or_code_has_raised(
    failure: Failure, was_cancelled_here: bool, error: type[Exception]
) -> None:
    stage: Any = SimpleNamespace(spark=SimpleNamespace(), num_ranks=1, was_cancelled_here=was_cancelled_here)
    cancelled = SparkConnectGrpcException("Job 7 cancelled part of cancelled job group mine")
    limits = HangLimits(hang_timeout_s=1.0, operation_timeout_s=1.0, silence_timeout_s=1.0)
    with pytest.raises(error) as caught:
        raise_for_failures([failure], cancelled, stage, limits)
    assert type(caught.value) is error


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


def test_a_module_that_only_the_driver_has_is_named_with_how_to_send_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_the_script.py").touch()
    (tmp_path / "folder_beside").mkdir()
    (tmp_path / "folder_beside" / "__init__.py").touch()

    def message(name: str) -> str:
        error = ModuleNotFoundError(f"No module named {name!r}", name=name)
        failure = Failure(rank=1, error=f"{error}", traceback="", pickled=pack_error(error))
        return str(rank_error(failure, were_lost=False))

    assert f"spark.sparkContext.addPyFile('{tmp_path}/beside_the_script.py')" in message("beside_the_script")
    assert "addPyFile(the zip file of its folder)" in message("folder_beside.part")
    assert "Install it for the Python of the ranks" in message("pytest")
    assert "The driver has" not in message("nowhere_at_all")


def test_a_cut_connection_names_both_of_its_ends_unless_a_process_was_lost():
    def lost(rank: int, origin: str = "lost", **changes: bool) -> Failure:
        fields = {"is_consequence": True, "origin": origin, **changes}
        return Failure(rank=rank, host=f"h{rank}", error=f"rank {1 - rank} was lost", traceback="", **fields)

    both = [lost(0), lost(1)]
    error = link_error(both, 2)
    assert isinstance(error, LinkLostError)
    assert "rank 0 on h0 reported: rank 1 was lost; rank 1 on h1 reported: rank 0 was lost" in str(error)
    assert link_error([*both, lost(2, "aborted")], 3) is not None
    assert link_error(both, 3) is None, "a rank that reported nothing may be dead"
    assert link_error([lost(0), lost(1, "", is_consequence=False, is_loss=True)], 2) is None
    assert link_error([lost(0, "aborted"), lost(1, "aborted")], 2) is None
    assert link_error([], 2) is None


def test_an_error_with_another_number_of_its_rank_keeps_the_rest() -> None:
    error = HangError("Rank 0 on a hung: Rank 0 waits", rank=0, host="a", report="stacks").at("epoch 2")
    error.__cause__ = LookupError("none")
    other = renumber_rank(error, 5)
    assert str(other) == "Rank 5 on a hung: Rank 0 waits"
    assert vars(other) == {**vars(error), "rank": 5}
    assert other.__cause__ is error.__cause__
