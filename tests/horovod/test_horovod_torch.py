"""``sparkdl.horovod.torch`` behaves as ``horovod.torch`` 0.28.1 does."""

from __future__ import annotations

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.errors import LaunchError, RankLostError
from tests.checks import require
from tests.horovod.worlds import checks_of, run_world
from tests.run_ranks import RankEnvironment, run_ranks

TWO_RANKS = [
    "tests.horovod.collective_checks",
    "tests.horovod.gradient_checks",
    "tests.horovod.matching_checks",
    "tests.horovod.joining_checks",
    "tests.horovod.optimizer_checks",
    "tests.horovod.wrapping_checks",
    "tests.horovod.state_checks",
    "tests.horovod.session_checks",
    "tests.horovod.timeline_checks",
]
THREE_RANKS = ["tests.horovod.process_set_checks", "tests.horovod.sampler_checks"]


@pytest.fixture(scope="module")
def outcomes_of_two() -> dict[str, str | None]:
    return run_world(TWO_RANKS, 2)


@pytest.fixture(scope="module")
def outcomes_of_three() -> dict[str, str | None]:
    return run_world(THREE_RANKS, 3)


@pytest.mark.parametrize("check", checks_of(TWO_RANKS))
def test_check_holds_on_two_ranks(check: str, outcomes_of_two: dict[str, str | None]) -> None:
    require(outcomes_of_two[check])


@pytest.mark.parametrize("check", checks_of(THREE_RANKS))
def test_check_holds_on_three_ranks(check: str, outcomes_of_three: dict[str, str | None]) -> None:
    require(outcomes_of_three[check])


def test_init_outside_a_rank_says_how_to_start_ranks() -> None:
    with pytest.raises(LaunchError, match="sparkdl.Runner"):
        hvd.init()
    assert not hvd.is_initialized()


def test_calls_before_init_raise_horovods_error() -> None:
    message = r"Horovod has not been initialized; use hvd\.init\(\)\."
    with pytest.raises(ValueError, match=message):
        hvd.rank()
    with pytest.raises(ValueError, match=message):
        hvd.add_process_set([0])
    with pytest.raises(hvd.HorovodInternalError, match=message):
        hvd.allreduce(torch.ones(1))
    assert not hvd.mpi_enabled()
    assert not hvd.gloo_enabled()


def test_death_of_a_rank_is_horovods_internal_error() -> None:
    assert run_ranks(2, _lose_a_rank, may_die=[1])[0] == RankLostError.__name__


def _lose_a_rank(environment: RankEnvironment) -> str:
    with environment.communicator():
        hvd.init()
        hvd.allreduce(torch.ones(3))
        if environment.rank == 1:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        handle = hvd.allreduce_async(torch.ones(3), name="never")
        with pytest.raises(hvd.HorovodInternalError, match="rank 1") as caught:
            hvd.synchronize(handle)
        with pytest.raises(hvd.HorovodInternalError, match="has been shut down"):
            hvd.allreduce(torch.ones(3))
        hvd.shutdown()
    return type(caught.value.__cause__).__name__
