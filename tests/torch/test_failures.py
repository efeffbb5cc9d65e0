"""A lost rank or a failure reaches whoever waits, in our own exceptions."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparkdl.torch
from sparkdl.errors import CommunicatorAbortedError, CommunicatorTimeoutError, RankLostError
from tests.run_ranks import RankEnvironment, run_ranks


def _lose_rank_one(environment: RankEnvironment, where: str) -> str:
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=30.0)
        module = DistributedDataParallel(torch.nn.Linear(4, 2))
        dist.barrier()
        if communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankLostError, match="1") as caught:
            _fail(where, module)
        sparkdl.torch.destroy_process_group()
    return str(caught.value)


def _fail(where: str, module: torch.nn.Module) -> None:
    if where == "all_reduce":
        dist.all_reduce(torch.ones(4))
    elif where == "wait":
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    else:
        with sparkdl.torch.collective_errors():
            module(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("where", ["all_reduce", "wait", "backward"])
def test_a_killed_peer_raises_rank_lost_error_that_names_it(where: str) -> None:
    results = run_ranks(2, _lose_rank_one, where, may_die=[1], timeout_s=40.0)
    assert "rank 1" in results[0]


def _miss_a_deadline(environment: RankEnvironment) -> str:
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=0.5)
        if communicator.rank == 1:
            environment.rendezvous.get("rank 0 gave up", 30.0)
            return ""
        with pytest.raises(CommunicatorTimeoutError) as caught:
            dist.barrier()
        environment.rendezvous.set("rank 0 gave up", b"")
    return str(caught.value)


def test_a_collective_that_a_rank_does_not_join_names_it_at_the_deadline() -> None:
    assert "1" in run_ranks(2, _miss_a_deadline, timeout_s=40.0)[0]


def _abort(environment: RankEnvironment) -> None:
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=30.0)
        if communicator.rank == 1:
            dist.group.WORLD.abort()
        with pytest.raises(CommunicatorAbortedError, match="rank 1 aborted"):
            dist.barrier()


def test_an_aborted_group_fails_on_all_ranks() -> None:
    run_ranks(2, _abort, timeout_s=40.0)
