"""The pending waits of a process for other ranks, as the watch for hangs sees them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sparkdl.collective.mpi.library import load_mpi
from sparkdl.collective.telemetry.stalls import NotedWait, Wait, pending_waits
from sparkdl.rendezvous.deadline import MAX_TIMEOUT_S
from tests.collective.eventually import eventually
from tests.run_ranks import run_ranks

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment


def test_noted_wait_is_pending_until_it_ends() -> None:
    with NotedWait("world/pair", (3, 5), "requests", 7.0):
        (wait,) = pending_waits()
        assert wait[:3] == ("world/pair", (3, 5), "requests")
        assert wait.timeout_s == 7.0
        assert wait.waited_s >= 0.0
    assert pending_waits() == []


def test_wait_without_a_deadline_is_not_pending() -> None:
    with NotedWait("world/messages 0 to 1", (0, 1), "broadcast", MAX_TIMEOUT_S):
        assert pending_waits() == []


def wait_in_all(environment: RankEnvironment) -> dict[str, Any]:
    """Rank 1 is late for an opening, an operation of a process set, and a message."""
    seen: dict[str, Any] = {}
    if environment.transport == "mpi":
        load_mpi()  # all ranks load MPI at the same time, holding Python's lock

    def note(what: str, begins: str) -> None:
        if environment.rank == 1:
            environment.rendezvous.get(what, 40.0)
        elif environment.rank == 0:
            threading.Thread(target=look, args=(what, begins, time.monotonic())).start()

    def look(what: str, begins: str, began: float) -> None:
        """Observe the wait that rank 1 ends when it joins; it joins when this is done."""

        def waits() -> list[Wait]:
            return [wait for wait in pending_waits() if wait.operation.startswith(begins)]

        # Until its time shows that it is not a wait that has just begun.
        assert eventually(lambda: any(wait.waited_s > 0.25 for wait in waits()), timeout_s=20.0)
        seen[what] = waits()
        assert all(wait.waited_s <= time.monotonic() - began for wait in seen[what])
        environment.rendezvous.set(what, b"")

    note("opening", "opening")
    with environment.open(host_of_rank=(0, 0, 0)) as communicator:
        pair = communicator.split([1, 0], "pair")
        if not pair.is_member:
            return seen
        with pair:
            note("operation", "allreduce")
            pair.allreduce(np.ones(3), name="weights", timeout_s=11.0)
            note("message", "recv")
            if environment.rank == 1:
                pair.send(np.ones(2), to=1)
            else:
                pair.recv(np.ones(2), source=0)
            assert eventually(lambda: pending_waits() == [], timeout_s=20.0), pending_waits()
    return seen


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow), "mpi"])
def test_pending_wait_has_process_set_world_ranks_and_deadline(transport: str) -> None:
    if transport == "mpi":
        pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    first, second, _ = run_ranks(3, wait_in_all, transport=transport)
    assert second == {}
    (opening,) = first["opening"]
    assert opening[:3] == ("world", (0, 1, 2), "opening")
    (operation,) = first["operation"]
    assert operation[:2] == ("world/pair", (1, 0))
    assert operation[2].startswith("allreduce 'weights' of 3 float64")
    assert operation[4] == 11.0
    (message,) = first["message"]
    assert message[2].startswith("recv of 2 float64 from rank 0")
    assert message[:2] == ("world/pair", (0, 1))
