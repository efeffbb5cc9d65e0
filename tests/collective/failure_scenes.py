"""What goes wrong in the tests of failure, and what each rank sees of it. Runs on ranks.

One world plays the scenes one after the other, each on a new communicator; the last one kills a rank.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective import Address, Communicator, all_gather_bytes, new_secret, open_communicator
from sparkdl.collective.mpi_library import load_mpi
from sparkdl.errors import SparkdlError
from tests.collective.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.run_ranks import RankEnvironment


Outcome = dict[str, Any]


def play(environment: RankEnvironment) -> dict[str, Outcome]:
    """Play all scenes in the same order on every rank; what a rank saw of each, by name."""
    return {name: _play_one(scene, environment) for name, scene in SCENES.items()}


def _play_one(scene: Callable[[RankEnvironment], Outcome], environment: RankEnvironment) -> Outcome:
    try:
        return scene(environment)
    except Exception:
        return {"unexpected": traceback.format_exc()}


def _error_of(call: Callable[[], object]) -> Outcome:
    """Type name and message of the error that ``call`` raises, and after how many seconds."""
    start = time.monotonic()
    try:
        call()
    except SparkdlError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {
            "kinds": kinds,
            "message": str(error),
            "seconds": time.monotonic() - start,
            "at": time.monotonic(),
        }
    return {"kinds": [], "message": "nothing was raised"}


def late_rank(environment: RankEnvironment) -> Outcome:
    with environment.open(name="late") as communicator:
        communicator.barrier()
        others = range(environment.world_size - 1)
        if environment.rank == environment.world_size - 1:
            for other in others:
                environment.rendezvous.get(f"gave up/{other}", 30.0)
            return {}
        seen = _error_of(lambda: communicator.allreduce(np.ones(3), timeout_s=0.5))
        environment.rendezvous.set(f"gave up/{environment.rank}", b"")
        seen["failure"] = communicator.failure
        seen["again"] = _error_of(communicator.barrier)
        # Nobody leaves before all have looked, as leaving is news too.
        for other in others:
            environment.rendezvous.get(f"gave up/{other}", 30.0)
        return seen


def late_asynchronous_rank(environment: RankEnvironment) -> Outcome:
    with environment.open(name="late asynchronous") as communicator:
        communicator.barrier()
        if environment.rank == 0:
            environment.rendezvous.get("asynchronous gave up", 30.0)
            return {}
        if environment.rank > 1:
            environment.rendezvous.get("asynchronous gave up", 30.0)
            return {}
        handle = communicator.allreduce_async(np.ones(3), timeout_s=0.5)
        seen = _error_of(handle.wait)
        seen["done"] = handle.done()
        environment.rendezvous.set("asynchronous gave up", b"")
        return seen


def aborted(environment: RankEnvironment) -> Outcome:
    with environment.open(name="aborted") as communicator:
        if environment.rank == 0:
            for other in range(1, environment.world_size):
                environment.rendezvous.get(f"waits/{other}", 30.0)
            start = time.monotonic()
            communicator.abort("the data is rotten")
            seconds = time.monotonic() - start
            return {**_error_of(communicator.barrier), "seconds to abort": seconds}
        environment.rendezvous.set(f"waits/{environment.rank}", b"")
        return _error_of(lambda: communicator.allreduce(np.ones(1_000_000)))


def exception_in_with(environment: RankEnvironment) -> Outcome:
    def body() -> None:
        with environment.open(name="exception") as communicator:
            if environment.rank == 1:
                raise ValueError("bad batch")
            communicator.barrier()

    try:
        return _error_of(body)
    except ValueError as error:
        return {"kinds": ["ValueError"], "message": str(error)}


def left_early(environment: RankEnvironment) -> Outcome:
    """A rank that closes while others still communicate is not a death, but they must not hang."""
    with environment.open(name="left early") as communicator:
        communicator.barrier()
        if environment.rank == 0:
            return {}
        return _error_of(lambda: communicator.allreduce(np.ones(3), timeout_s=1.0))


def closed(environment: RankEnvironment) -> Outcome:
    communicator = environment.open(name="closed")
    communicator.barrier()
    communicator.close()
    communicator.close()
    communicator.abort("too late to matter")
    seen = _error_of(communicator.barrier)
    with environment.open(name="closed") as again:
        total = np.ones(2)
        again.allreduce(total)
    return {**seen, "total": total.tolist()}


def process_sets(environment: RankEnvironment) -> Outcome:
    rank, world_size = environment.rank, environment.world_size
    seen: Outcome = {}
    with environment.open(name="sets") as communicator:
        backwards = communicator.split(list(range(world_size))[::-1], "backwards")
        assert backwards is not None
        with backwards:
            seen["backwards"] = _gather_ranks(backwards, rank)
        pair = communicator.split([0, 1], "pair")
        seen["pair"] = None if pair is None else _gather_ranks(pair, rank)
        overlapping = communicator.split([world_size - 1, 0], "overlapping")
        seen["overlapping"] = None if overlapping is None else _gather_ranks(overlapping, rank)
        seen["at once"] = _reduce_at_once([communicator, pair, overlapping])
        for process_set in (pair, overlapping):
            if process_set is not None:
                process_set.close()
        for name, ranks in {"empty": [], "twice": [0, 0], "outside": [0, world_size]}.items():
            seen[name] = _error_of(lambda ranks=ranks: communicator.split(ranks, "bad"))["kinds"]
        alone = communicator.split([rank], f"alone {rank}")
        assert alone is not None
        with alone:
            total = np.ones(2)
            alone.allreduce(total)
            seen["alone"] = total.tolist()
        communicator.barrier()
    return seen


def _gather_ranks(communicator: Communicator, rank: int) -> list[int]:
    out = np.empty(communicator.world_size, np.int64)
    communicator.allgather(np.array([rank]), out)
    return out.tolist()


def _reduce_at_once(communicators: list[Communicator | None]) -> list[float | None]:
    """Use several communicators from as many threads; the sum of each over 20 rounds."""
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
        if communicator is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def opened_many_times(environment: RankEnvironment) -> Outcome:
    """Descriptors, threads and keys in the store after few and after many openings."""
    counts = []
    for number_of_openings in (3, 12):
        for _ in range(number_of_openings):
            with environment.open(name="many") as communicator:
                communicator.barrier()
        eventually(lambda: not any("peer-watch" in thread.name for thread in threading.enumerate()))
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return {"few": counts[0], "many": counts[1]}


def absent_rank(environment: RankEnvironment) -> Outcome:
    if environment.rank == 1:
        environment.rendezvous.get("nobody came", 30.0)
        return {}
    seen = _error_of(lambda: environment.open(name="absent", timeout_s=0.5))
    if environment.rank == 0:
        environment.rendezvous.set("nobody came", b"")
    return seen


def killed(environment: RankEnvironment) -> Outcome:
    with environment.open(name="killed", timeout_s=30.0) as communicator:
        communicator.barrier()
        if environment.rank == 1:
            environment.rendezvous.set("killed at", str(time.monotonic()).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        seen = _error_of(lambda: communicator.allreduce(np.ones(1_000_000)))
        seen["seconds"] = seen["at"] - float(environment.rendezvous.get("killed at", 5.0))
        seen["again"] = _error_of(communicator.barrier)
        start = time.monotonic()
    return {**seen, "seconds to close": time.monotonic() - start}


SCENES: dict[str, Callable[[RankEnvironment], Outcome]] = {
    "late": late_rank,
    "late asynchronous": late_asynchronous_rank,
    "aborted": aborted,
    "exception": exception_in_with,
    "left early": left_early,
    "closed": closed,
    "process sets": process_sets,
    "many": opened_many_times,
    "absent": absent_rank,
    "killed": killed,
}


def wrong_secret(environment: RankEnvironment) -> Outcome:
    secret = environment.secret if environment.rank == 0 else new_secret()
    return _error_of(
        lambda: open_communicator(
            rendezvous=environment.rendezvous,
            rank=environment.rank,
            world_size=environment.world_size,
            secret=secret,
            transport=environment.transport,
            timeout_s=3.0,
        )
    )


def stranger_at_the_listener(environment: RankEnvironment) -> Outcome:
    """Rank 1 sends garbage to the port of rank 0 before it connects as it should, and holds silent connections."""
    silent = []
    if environment.rank == 1:
        published = environment.rendezvous.get("communicator/world/1/connections/addresses/0", 20.0)
        address = Address.from_bytes(published)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 500, b"\x80\x04\x95", b"x"):
            with socket.create_connection((address.hosts[0], address.port)) as stranger:
                stranger.sendall(garbage)
        silent = [socket.create_connection((address.hosts[0], address.port)) for _ in range(100)]
    # Told who shares a host, the ranks begin with the connections.
    with environment.open(host_of_rank=(0, 0)) as communicator:
        total = np.ones(1)
        communicator.allreduce(total)
    for stranger in silent:
        stranger.close()
    return {"total": total.tolist()}


def no_room_for_the_segment(environment: RankEnvironment) -> Outcome:
    """A limit on file sizes stands for a small /dev/shm: reserving the segment fails in the same place."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl.collective").addHandler(handler)
    with environment.open(transport="auto", name="auto") as communicator:
        total = np.ones(3)
        communicator.allreduce(total)
    return {
        "total": total.tolist(),
        "hosts": communicator.topology.host_of_rank,
        "warnings": records,
        "shm": _error_of(lambda: environment.open(transport="shm", name="shm")),
    }


def place(environment: RankEnvironment, transport: str) -> Outcome:
    """Where a rank finds itself and its process set, for whatever carries the data."""
    with environment.open(transport=transport) as communicator, _split_all(communicator) as process_set:
        return {
            "hosts": communicator.topology.host_of_rank,
            "local rank": communicator.topology.local_rank,
            "local size": communicator.topology.local_size,
            "requested": communicator.requested_transport,
            "process set": (process_set.requested_transport, process_set.topology.local_size),
        }


def _split_all(communicator: Communicator) -> Communicator:
    process_set = communicator.split(range(communicator.world_size), "all")
    assert process_set is not None
    return process_set


def dies_while_mpi_makes_the_communicator(environment: RankEnvironment) -> Outcome:
    """Rank 1 takes part in the exchange that comes before, as if it were opening too."""
    if environment.rank == 0:
        return _error_of(lambda: environment.open(name="half made", timeout_s=1.5, host_of_rank=(0, 0)))
    load_mpi()
    rendezvous = environment.rendezvous.prefix("communicator/half made/1")
    all_gather_bytes(rendezvous, key="mpi/places", rank=1, world_size=2, value=b"[1, 2]", timeout_s=10.0)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def not_one_host(environment: RankEnvironment) -> Outcome:
    return _error_of(lambda: environment.open(transport="shm", host_of_rank=(0, 1)))


def no_mpi_world(environment: RankEnvironment) -> Outcome:
    return _error_of(lambda: environment.open(transport="mpi"))


def unknown_transport(environment: RankEnvironment) -> Outcome:
    return _error_of(lambda: environment.open(transport="pigeon"))
