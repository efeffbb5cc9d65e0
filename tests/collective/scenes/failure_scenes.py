"""Scenes of failure, and what each rank sees of them. Runs on ranks.

One world plays the scenes one after the other, each on a new communicator; the last scene kills a rank.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective import Communicator
from tests.collective.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.run_ranks import RankEnvironment


Outcome = dict[str, Any]

LONG_S = 60.0
"""Deadline of operations that fail long before it; long enough to tell the two apart on a busy machine."""


def play(environment: RankEnvironment) -> dict[str, Outcome]:
    """Play all scenes in the same order on every rank; return by name what this rank saw of each.

    In addition, ``"shared memory"`` has the named ``files`` in shared memory that the rank used, and whether it made
    ``nameless`` ones, which cannot remain after it.
    """
    files: set[str] = set()
    nameless: list[int] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            files.add(str(arguments[0]))
            if str(arguments[0]) == "/dev/shm" and arguments[2] & os.O_TMPFILE == os.O_TMPFILE:
                nameless.append(arguments[2])

    sys.addaudithook(note)
    outcomes = {name: _play_one(scene, environment) for name, scene in SCENES.items()}
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    used = {*filter(_is_shared, files), *filter(_is_shared, maps)}
    return {**outcomes, "shared memory": {"files": used, "nameless": bool(nameless)}}


def _is_shared(path: str) -> bool:
    return path.startswith(("/dev/shm/sparkdl-", "/dev/shm/mpich_"))


def _play_one(scene: Callable[[RankEnvironment], Outcome], environment: RankEnvironment) -> Outcome:
    try:
        return scene(environment)
    except Exception:
        return {"unexpected": traceback.format_exc()}


def error_of(call: Callable[[], object]) -> Outcome:
    """The type names and the message of the error that ``call`` raises, and the seconds until then."""
    start = time.monotonic()
    kinds, message = [], "nothing was raised"
    try:
        call()
    except Exception as error:
        kinds, message = [kind.__name__ for kind in type(error).__mro__], str(error)
    now = time.monotonic()
    return {"kinds": kinds, "message": message, "seconds": now - start, "at": now}


def late_rank(environment: RankEnvironment) -> Outcome:
    with environment.open(name="late", timeout_s=LONG_S) as communicator:
        communicator.barrier()
        others = range(environment.world_size - 1)
        if environment.rank == environment.world_size - 1:
            for other in others:
                environment.rendezvous.get(f"gave up/{other}", 30.0)
            return {}
        seen = error_of(lambda: communicator.allreduce(np.ones(3), timeout_s=0.5))
        environment.rendezvous.set(f"gave up/{environment.rank}", b"")
        seen["failure"] = communicator.failure
        seen["again"] = error_of(communicator.barrier)
        # No rank closes before all have looked, because closing sends news to the others, too.
        for other in others:
            environment.rendezvous.get(f"gave up/{other}", 30.0)
        return seen


def late_asynchronous_rank(environment: RankEnvironment) -> Outcome:
    with environment.open(name="late asynchronous") as communicator:
        communicator.barrier()
        if environment.rank < environment.world_size - 1:
            environment.rendezvous.get("asynchronous gave up", 30.0)
            return {}
        handle = communicator.allreduce_async(np.ones(3), timeout_s=0.5)
        seen = error_of(handle.wait)
        seen["done"] = handle.done()
        environment.rendezvous.set("asynchronous gave up", b"")
        return seen


def aborted(environment: RankEnvironment) -> Outcome:
    with environment.open(name="aborted", timeout_s=LONG_S) as communicator:
        if environment.rank == 0:
            for other in range(1, environment.world_size):
                environment.rendezvous.get(f"waits/{other}", 30.0)
            start = time.monotonic()
            communicator.abort("the data is rotten")
            seconds = time.monotonic() - start
            return {**error_of(communicator.barrier), "seconds to abort": seconds}
        environment.rendezvous.set(f"waits/{environment.rank}", b"")
        return error_of(lambda: communicator.allreduce(np.ones(1_000_000)))


def exception_in_with(environment: RankEnvironment) -> Outcome:
    def body() -> None:
        with environment.open(name="exception") as communicator:
            if environment.rank == environment.world_size - 1:
                raise ValueError("bad batch")
            communicator.barrier()

    return error_of(body)


def left_early(environment: RankEnvironment) -> Outcome:
    """A rank that closes while others still communicate has not died, but the others must not hang."""
    with environment.open(name="left early", timeout_s=LONG_S) as communicator:
        communicator.barrier()
        if environment.rank == 0:
            # Otherwise the failure on one rank could end the barrier of another.
            for other in range(1, environment.world_size):
                environment.rendezvous.get(f"past the barrier/{other}", 30.0)
            return {}
        environment.rendezvous.set(f"past the barrier/{environment.rank}", b"")
        return error_of(lambda: communicator.allreduce(np.ones(3), timeout_s=1.0))


def closed(environment: RankEnvironment) -> Outcome:
    communicator = environment.open(name="closed")
    communicator.barrier()
    communicator.close()
    communicator.close()
    communicator.abort("too late to matter")
    seen = error_of(communicator.barrier)
    with environment.open(name="closed") as again:
        total = np.ones(2)
        again.allreduce(total)
    return {**seen, "total": total.tolist()}


def process_sets(environment: RankEnvironment) -> Outcome:
    rank, world_size = environment.rank, environment.world_size
    seen: Outcome = {}
    with environment.open(name="sets") as communicator:
        backwards = communicator.split(list(range(world_size))[::-1], "backwards")
        with backwards:
            seen["backwards"] = _gather_ranks(backwards, rank)
        pair = communicator.split([0, 1], "pair")
        seen["pair"] = _gather_ranks(pair, rank) if pair.is_member else _refusals(pair)
        overlapping = communicator.split([world_size - 1, 0], "overlapping")
        seen["overlapping"] = _gather_ranks(overlapping, rank) if overlapping.is_member else None
        seen["at once"] = _reduce_at_once([communicator, pair, overlapping])
        for process_set in (pair, overlapping):
            process_set.close()
        for name, ranks in {"empty": [], "twice": [0, 0], "outside": [0, world_size]}.items():
            seen[name] = error_of(lambda ranks=ranks: communicator.split(ranks, "bad"))["kinds"]
        alone = communicator.split([rank], f"alone {rank}")
        with alone:
            total = np.ones(2)
            alone.allreduce(total)
            seen["alone"] = total.tolist()
        communicator.barrier()
    return seen


def _refusals(process_set: Communicator) -> list[Outcome]:
    """The errors that a rank outside the process set gets."""
    return [error_of(lambda: process_set.allreduce(np.ones(2))), error_of(lambda: process_set.world_size)]


def _gather_ranks(communicator: Communicator, rank: int) -> list[int]:
    out = np.empty(communicator.world_size, np.int64)
    communicator.allgather(np.array([rank]), out)
    return out.tolist()


def _reduce_at_once(communicators: list[Communicator]) -> list[float | None]:
    """Use several communicators at once, each in its own thread; return the sum of each over 20 rounds."""
    totals: list[float | None] = [None] * len(communicators)

    def use(position: int, communicator: Communicator) -> None:
        total = 0.0
        for _ in range(20):
            array = np.ones(1000)
            communicator.allreduce(array)
            total += float(array[0])
        totals[position] = total

    threads = [
        threading.Thread(target=use, args=(position, communicator))
        for position, communicator in enumerate(communicators)
        if communicator.is_member
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def closed_many_times(environment: RankEnvironment) -> Outcome:
    def use() -> None:
        with environment.open(name="closed many times") as communicator:
            communicator.barrier()
            _exchange_messages(communicator)

    return _held_after(use, (3, 12))


def dropped_many_times(environment: RankEnvironment) -> Outcome:
    if environment.transport == "mpi":
        return {}  # all ranks have to free MPI's communicators together

    def use() -> None:
        communicator = environment.open(name="dropped many times")
        _exchange_messages(communicator)
        communicator.barrier()

    return _held_after(use, (2, 8))


def _held_after(use: Callable[[], None], numbers: tuple[int, int]) -> Outcome:
    """Numbers of descriptors and threads after few and after many uses."""
    counts = []
    for number in numbers:
        for _ in range(number):
            use()
        counts.append(_fds_and_threads())
    return {"few": counts[0], "many": counts[1]}


def _fds_and_threads() -> tuple[int, int]:
    """Numbers of descriptors and threads, once short-lived threads have ended."""
    passing = ("peer-watch", "messages")
    eventually(lambda: not any(word in thread.name for thread in threading.enumerate() for word in passing))
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _exchange_messages(communicator: Communicator) -> None:
    """Rank 0 and rank 1 send a message to each other."""
    if communicator.rank < 2:
        handle = communicator.send_async(np.ones(100), to=1 - communicator.rank)
        communicator.recv(np.zeros(100), source=1 - communicator.rank)
        handle.wait()


def late_message(environment: RankEnvironment) -> Outcome:
    with environment.open(name="late message", timeout_s=LONG_S) as communicator:
        if environment.rank > 0:
            # All further operations fail, too, because rank 0 no longer takes part in any.
            return error_of(communicator.barrier)
        seen = error_of(lambda: communicator.recv(np.ones(3), source=1, tag=4, timeout_s=0.5))
        seen["failure"] = communicator.failure
        seen["again"] = error_of(lambda: communicator.send(np.ones(3), to=1))
        return seen


def aborted_while_messages_wait(environment: RankEnvironment) -> Outcome:
    """Rank 0 waits for rank 2, to which it has sent before, and for a first message from rank 1."""
    with environment.open(name="aborted messages", timeout_s=LONG_S) as communicator:
        if environment.rank == 1:
            environment.rendezvous.get("message waits", 30.0)
            communicator.abort("no more messages")
            return {}
        if environment.rank == 2:
            communicator.recv(np.zeros(1), source=0)
            environment.rendezvous.set("message came", b"")
            environment.rendezvous.get("aborted message", 30.0)
            return {}
        communicator.send(np.zeros(1), to=2)
        environment.rendezvous.get("message came", 30.0)
        handles = [communicator.recv_async(np.zeros(1), source=source) for source in (2, 1)]
        environment.rendezvous.set("message waits", b"")
        seen = [error_of(handle.wait) for handle in handles]
        environment.rendezvous.set("aborted message", b"")
        return {"seen": seen}


def absent_rank(environment: RankEnvironment) -> Outcome:
    if environment.rank == 1:
        environment.rendezvous.get("nobody came", 30.0)
        return {}
    seen = error_of(lambda: environment.open(name="absent", timeout_s=0.5))
    if environment.rank == 0:
        environment.rendezvous.set("nobody came", b"")
    return seen


def killed(environment: RankEnvironment) -> Outcome:
    with environment.open(name="killed", timeout_s=LONG_S) as communicator:
        large = np.ones(1_000_000)
        communicator.barrier()
        if environment.rank == 1:
            environment.rendezvous.set("killed at", str(time.monotonic()).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        seen = error_of(lambda: communicator.allreduce(large))
        seen["seconds"] = seen["at"] - float(environment.rendezvous.get("killed at", 5.0))
        seen["again"] = error_of(communicator.barrier)
        start = time.monotonic()
    return {**seen, "seconds to close": time.monotonic() - start}


SCENES: dict[str, Callable[[RankEnvironment], Outcome]] = {
    "late": late_rank,
    "late asynchronous": late_asynchronous_rank,
    "aborted": aborted,
    "exception": exception_in_with,
    "left early": left_early,
    "late message": late_message,
    "aborted messages": aborted_while_messages_wait,
    "closed": closed,
    "process sets": process_sets,
    "closed many times": closed_many_times,
    "dropped many times": dropped_many_times,
    "absent": absent_rank,
    "killed": killed,
}


def killed_while_messages_wait(environment: RankEnvironment) -> Outcome:
    """Rank 0 waits for the killed rank, and rank 2 for rank 0."""
    with environment.open(timeout_s=LONG_S) as communicator:
        _exchange_messages(communicator)
        communicator.barrier()
        if environment.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        source = 1 if environment.rank == 0 else 0
        return error_of(lambda: communicator.recv(np.zeros(5), source=source))


def place(environment: RankEnvironment, transport: str) -> Outcome:
    """The place of a rank and of its process set over some transport."""
    with environment.open(transport=transport) as communicator, _split_all(communicator) as process_set:
        return {
            "hosts": communicator.topology.host_of_rank,
            "local rank": communicator.topology.local_rank,
            "local size": communicator.topology.local_size,
            "requested": communicator.requested_transport,
            "process set": (process_set.requested_transport, process_set.topology.local_size),
        }


def _split_all(communicator: Communicator) -> Communicator:
    return communicator.split(range(communicator.world_size), "all")
