"""A lost rank or a failure reaches all waiting ranks as an exception of sparkdl."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparkdl.torch
from sparkdl.collective import Communicator
from sparkdl.errors import CommunicatorAbortedError, CommunicatorTimeoutError, RankLostError
from tests.run_ranks import RankEnvironment, run_ranks

KILLED_AT = ("all_reduce", "wait", "backward")


def _miss_a_deadline(environment: RankEnvironment, communicator: Communicator) -> str:
    sparkdl.torch.init_process_group(communicator, timeout_s=0.5)
    if communicator.rank == 1:
        environment.rendezvous.get("rank 0 gave up", 30.0)
        return ""
    with pytest.raises(CommunicatorTimeoutError) as caught:
        dist.barrier()
    environment.rendezvous.set("rank 0 gave up", b"")
    return str(caught.value)


def _abort(_: RankEnvironment, communicator: Communicator) -> str:
    sparkdl.torch.init_process_group(communicator, timeout_s=30.0)
    if communicator.rank == 1:
        dist.group.WORLD.abort()
    with pytest.raises(CommunicatorAbortedError) as caught:
        dist.barrier()
    return str(caught.value)


def _lose_rank_one(_: RankEnvironment, communicator: Communicator) -> dict[str, str]:
    """Rank 0 sees the death in three groups. Each has its own communicator that detects it."""
    sparkdl.torch.init_process_group(communicator, timeout_s=30.0)
    groups = {where: dist.new_group([0, 1]) for where in KILLED_AT}
    module = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=groups["backward"])
    dist.barrier()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    messages = {}
    for where, group in groups.items():
        with pytest.raises(RankLostError) as caught:
            _fail(where, group, module)
        messages[where] = str(caught.value)
    return messages


def _fail(where: str, group: dist.ProcessGroup, module: torch.nn.Module) -> None:
    if where == "all_reduce":
        dist.all_reduce(torch.ones(4), group=group)
    elif where == "wait":
        dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()
    else:
        with sparkdl.torch.collective_errors(group):
            module(torch.ones(1, 4)).sum().backward()


SCENES: dict[str, Callable[[RankEnvironment, Communicator], Any]] = {
    "deadline": _miss_a_deadline,
    "abort": _abort,
    "killed": _lose_rank_one,
}


def _play(environment: RankEnvironment) -> dict[str, Any]:
    """Play all scenes, each on a new communicator; the last scene kills rank 1."""
    outcomes: dict[str, Any] = {}
    for name, scene in SCENES.items():
        with environment.open(name=name) as communicator:
            outcomes[name] = scene(environment, communicator)
            sparkdl.torch.destroy_process_group()
    return outcomes


@cache
def seen() -> dict[str, Any]:
    """What rank 0 saw of all scenes; starting ranks that import torch takes longer than playing them."""
    outcomes: dict[str, Any] = run_ranks(2, _play, may_die=[1])[0]
    return outcomes


@pytest.mark.parametrize("where", KILLED_AT)
def test_a_killed_peer_raises_rank_lost_error_that_names_it(where: str) -> None:
    assert "rank 1" in seen()["killed"][where]


def test_a_collective_that_a_rank_does_not_join_names_it_at_the_deadline() -> None:
    assert "rank 1 had not joined" in seen()["deadline"]


def test_an_aborted_group_fails_on_all_ranks() -> None:
    assert "rank 1 aborted" in seen()["abort"]
