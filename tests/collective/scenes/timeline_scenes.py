"""Scenes for the tests of the timeline. One world plays them one after the other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective import StallCheck
from sparkdl.collective.telemetry.clock_offset import measure_offset
from sparkdl.errors import CommunicatorError
from tests.collective.eventually import eventually
from tests.collective.late_join import joined_last
from tests.collective.scenes.failure_scenes import Outcome, error_of
from tests.collective.scenes.logged import logged_warnings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment

LATE_RANK = 1
WAIT_S = 0.1
WATCHFUL = StallCheck(warn_after_s=0.2)


def play(environment: RankEnvironment, folder: str, hosts: Sequence[int]) -> dict[str, Outcome]:
    """Play all scenes; return by name what this rank saw of each. The file of a scene in ``folder`` has its name."""
    outcomes = {}
    for name, scene in SCENES.items():
        check = WATCHFUL if scene is failed else None
        with environment.open(name=name, host_of_rank=tuple(hosts), stall_check=check) as communicator:
            outcomes[name] = scene(communicator, Path(folder) / f"{name}.json")
    return outcomes


def _reduce(communicator: Communicator, name: str) -> None:
    communicator.allreduce(np.ones(1000, np.float32), name=name)


def _meet(communicator: Communicator, place: str) -> None:
    """Wait for all ranks without an operation that a timeline would show."""
    communicator.rendezvous.set(f"{place}/{communicator.rank}", b"")
    for rank in range(communicator.world_size):
        communicator.rendezvous.get(f"{place}/{rank}", 20.0)


def operations(communicator: Communicator, path: Path) -> Outcome:
    """A late rank, operations of all forms, and process sets opened before and during the timeline."""
    early = communicator.split([0, LATE_RANK], "early")
    _reduce(communicator, "before")
    communicator.start_timeline(path)
    _meet(communicator, "started")
    for number in range(3):
        name = f"weights {number}"
        with joined_last(communicator, "allreduce", late_rank=LATE_RANK, key=name, wait_s=WAIT_S):
            _reduce(communicator, name)
    handles = [communicator.allreduce_async(np.ones(50_000), name="queued") for _ in range(3)]
    for handle in handles:
        handle.wait()
    with communicator.split(range(communicator.world_size), "late") as late:
        late.allgather(np.ones(5, np.int32), np.ones(5 * late.world_size, np.int32))
    if early.is_member:
        early.broadcast(np.ones(7), root=0)
    early.close()
    communicator.barrier()
    communicator.stop_timeline()
    _reduce(communicator, "after")
    return {"exists": path.exists()}


def dropped(communicator: Communicator, path: Path) -> Outcome:
    """More operations than are kept."""
    communicator.start_timeline(path, max_events=5)
    for number in range(20):
        _reduce(communicator, str(number))
    with logged_warnings() as warnings:
        communicator.stop_timeline()
    return {"warnings": warnings}


def again(communicator: Communicator, path: Path) -> Outcome:
    """A second timeline has none of the first one's operations."""
    seen = {"stopped": error_of(communicator.stop_timeline)}
    for name in ("first", "second"):
        communicator.start_timeline(path)
        _reduce(communicator, name)
        seen["started"] = error_of(lambda: communicator.start_timeline(path))
        communicator.stop_timeline()
    seen["unwritable"] = error_of(lambda: communicator.start_timeline(path / "below a file"))
    _reduce(communicator, "still works")
    return seen


def closed(communicator: Communicator, path: Path) -> Outcome:
    """Closing the communicator ends the timeline."""
    communicator.start_timeline(path)
    _reduce(communicator, "the last")
    return {}


def failed(communicator: Communicator, path: Path) -> Outcome:
    """An exception of a rank ends the communicator, but does not lose the file."""
    communicator.start_timeline(path)
    _reduce(communicator, "good")
    # The news of the abort must not overtake the file.
    _meet(communicator, "good")
    try:
        with communicator:
            if communicator.rank == LATE_RANK:
                _meet(communicator, "bad")
                raise ValueError("bad batch")
            with logged_warnings() as warnings:
                handle = communicator.allreduce_async(np.ones(1000, np.float32), name="bad")
                # Only operations that have begun can fail; a warning shows that this one has.
                assert eventually(lambda: bool(warnings), timeout_s=20.0)
            _meet(communicator, "bad")
            handle.wait()
    except (ValueError, CommunicatorError) as error:
        return {"error": str(error)}
    return {}


def clocks(communicator: Communicator, path: Path) -> Outcome:
    """Ranks whose clocks are hours apart and run at different speeds."""
    shift = communicator.rank * 10**13

    def now() -> int:
        return time.monotonic_ns() + shift

    offset = measure_offset(communicator, now=now)
    return {"offset": offset.offset_ns, "error": offset.error_ns, "shift": shift}


SCENES = {
    "operations": operations,
    "dropped": dropped,
    "again": again,
    "closed": closed,
    "failed": failed,
    "clocks": clocks,
}


def killed(environment: RankEnvironment, path: str) -> Outcome:
    """A rank dies while a timeline runs."""
    with environment.open(name="killed") as communicator:
        communicator.start_timeline(path)
        _reduce(communicator, "all alive")
        if communicator.rank == LATE_RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = error_of(lambda: _reduce(communicator, "one dead"))
        start = time.monotonic()
        with logged_warnings() as warnings:
            communicator.stop_timeline()
        return {"error": seen, "warnings": warnings, "seconds": time.monotonic() - start}
