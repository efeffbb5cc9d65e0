"""Scenes for the tests of the stall inspector. One world plays them one after the other."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective import StallCheck
from tests.collective.eventually import eventually
from tests.collective.scenes.failure_scenes import Outcome, error_of
from tests.collective.scenes.logged import logged_warnings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment

WARN_S = 0.3
ABORT_S = 1.0
DEADLINE_S = 60.0
"""Deadline of operations that no stall ends."""


def play(environment: RankEnvironment, hosts: Sequence[int], stay_away: Sequence[int]) -> dict[str, Outcome]:
    """Play all scenes; return by name what this rank saw of each.

    Args:
        environment: environment of this rank.
        hosts: host of each rank.
        stay_away: ranks that join late.
    """
    stays_away = environment.rank in stay_away
    num_waiting = environment.world_size - len(stay_away)
    outcomes = {}
    for name, (scene, check) in SCENES.items():
        with environment.open(
            name=name, host_of_rank=tuple(hosts), stall_check=check, timeout_s=DEADLINE_S
        ) as communicator:
            communicator.barrier()
            outcomes[name] = scene(environment, communicator, 0 if stays_away else num_waiting)
    waits = next(rank for rank in range(environment.world_size) if rank not in stay_away)
    return {**outcomes, **_late_in_a_pair(environment, hosts, waits, stay_away[0])}


def _late_in_a_pair(
    environment: RankEnvironment, hosts: Sequence[int], waits: int, late: int
) -> dict[str, Outcome]:
    """In a process set of two ranks with other numbers, one waits for the other in an allreduce and a recv."""
    check = StallCheck(warn_after_s=WARN_S)
    with environment.open(name="pairs", host_of_rank=tuple(hosts), stall_check=check) as communicator:
        pair = communicator.split([late, waits], "pair")
        if not pair.is_member:
            return {"message": {"warnings": []}, "in a pair": {"warnings": []}}
        with pair:
            return {
                "in a pair": _late_allreduce(environment, pair, is_late=communicator.rank == late),
                "message": _late_message(environment, pair, is_late=communicator.rank == late),
            }


def _late_allreduce(environment: RankEnvironment, pair: Communicator, *, is_late: bool) -> Outcome:
    array = np.ones(5)
    with logged_warnings() as warnings:
        if is_late:
            environment.rendezvous.get("allreduce is missed", 20.0)
            pair.allreduce(array)
        else:
            handle = pair.allreduce_async(array)
            assert eventually(lambda: len(warnings) > 0, timeout_s=20.0)
            environment.rendezvous.set("allreduce is missed", b"")
            handle.wait()
    return {"warnings": warnings, "sum": float(array.sum())}


def _late_message(environment: RankEnvironment, pair: Communicator, *, is_late: bool) -> Outcome:
    with logged_warnings() as warnings:
        if is_late:
            environment.rendezvous.get("message is missed", 20.0)
            pair.send(np.ones(5), to=1, tag=7)
            return {"warnings": warnings}
        array = np.zeros(5)
        handle = pair.recv_async(array, source=0, tag=7)
        assert eventually(lambda: len(warnings) > 0, timeout_s=20.0)
        environment.rendezvous.set("message is missed", b"")
        handle.wait()
    return {"warnings": warnings, "sum": float(array.sum())}


def warned(environment: RankEnvironment, communicator: Communicator, num_waiting: int) -> Outcome:
    """The ranks that have joined get repeated warnings; then the others join, and the operation completes."""
    array = np.ones(5, np.float32)
    key = f"warned/{communicator.name}"
    with logged_warnings() as warnings:
        if not num_waiting:
            environment.rendezvous.get(f"{key}/by all", 20.0)
            communicator.allreduce(array, name="weights")
        else:
            handle = communicator.allreduce_async(array, name="weights")
            assert eventually(lambda: len(warnings) > 1, timeout_s=20.0)
            if environment.rendezvous.add(key, 1) == num_waiting:
                environment.rendezvous.set(f"{key}/by all", b"")
            handle.wait()
    return {"warnings": warnings, "sum": float(array[0])}


def given_up(environment: RankEnvironment, communicator: Communicator, num_waiting: int) -> Outcome:
    """The operation ends with an error, also on the ranks that stayed away."""
    start = time.monotonic()
    if not num_waiting:
        assert eventually(lambda: communicator.failure is not None, timeout_s=20.0)
    seen = error_of(lambda: communicator.allreduce(np.ones(5), name="weights"))
    return {**seen, "seconds": time.monotonic() - start}


def silent(environment: RankEnvironment, communicator: Communicator, num_waiting: int) -> Outcome:
    """Without a stall check there is no warning."""
    with logged_warnings() as warnings:
        if not num_waiting:
            threading.Event().wait(2 * WARN_S)
        communicator.allreduce(np.ones(5))
    return {"warnings": warnings}


def idle(environment: RankEnvironment, communicator: Communicator, num_waiting: int) -> Outcome:
    """An idle communicator uses no processor time, also after messages."""
    if communicator.rank < 2:
        handle = communicator.send_async(np.ones(5), to=1 - communicator.rank)
        communicator.recv(np.ones(5), source=1 - communicator.rank)
        handle.wait()
    # The minimum of several measurements, as Python itself needs some time now and then.
    return {"seconds": min(cpu_seconds_of_a_wait() for _ in range(3))}


def cpu_seconds_of_a_wait() -> float:
    """Processor time of all threads of this process in half a second."""
    before = time.process_time()
    threading.Event().wait(0.5)
    return time.process_time() - before


# A scene gets the number of ranks that wait, or 0 on a rank that stays away.
SCENES: dict[str, tuple[Callable[[RankEnvironment, Communicator, int], Outcome], StallCheck]] = {
    "warned": (warned, StallCheck(warn_after_s=WARN_S)),
    "given up": (given_up, StallCheck(warn_after_s=None, abort_after_s=ABORT_S)),
    "silent": (silent, StallCheck(warn_after_s=None)),
    "idle": (idle, StallCheck(warn_after_s=WARN_S)),
}
