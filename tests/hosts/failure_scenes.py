"""Failures of the last of several hosts, and what each rank sees of them. Runs on ranks.

The last host is the *victim*; the coordinator runs on the first. After each scene the surviving hosts open a new
communicator, and, once the victim is back, all hosts open one together.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective import open_communicator
from sparkdl.collective.native.ring_connections import connect_rings
from sparkdl.topology import Topology
from tests.collective.eventually import eventually
from tests.collective.scenes.failure_scenes import Outcome, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment

PATIENCE_S = 2.0
"""Deadline of operations that cannot succeed. The victims' is shorter, so that theirs has passed when they are back."""

_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40
_VICTIMS_PATIENCE_S = 1.0
_UNDER_WAY_BYTES = 2 << 20
_NUM_LARGE = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The parameters of the scenes.

    Attributes:
        host_of_rank: host of each rank.
        cut: command that cuts the victim's cable.
        fix: command that fixes it.
    """

    host_of_rank: tuple[int, ...]
    cut: list[str]
    fix: list[str]

    @property
    def victims(self) -> list[int]:
        """The ranks of the last host."""
        last = max(self.host_of_rank)
        return [rank for rank, host in enumerate(self.host_of_rank) if host == last]

    @property
    def survivors(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(len(self.host_of_rank)) if rank not in self.victims]


def play(environment: RankEnvironment, stage: Stage, names: Sequence[str]) -> dict[str, Outcome]:
    """Play some scenes in the same order on every rank; return by name what this rank saw of each."""
    return {name: _play_one(environment, stage, name) for name in names}


def _play_one(environment: RankEnvironment, stage: Stage, name: str) -> Outcome:
    try:
        return SCENES[name](environment, stage)
    except Exception:
        return {"unexpected": traceback.format_exc()}


def _cut_between_operations(environment: RankEnvironment, stage: Stage) -> Outcome:
    with _open(environment, "cut between operations") as communicator:
        if environment.rank == 0:
            # Otherwise a victim might not learn that all have opened until the cable is fixed.
            for victim in stage.victims:
                environment.rendezvous.get(f"is about to reduce/{victim}", 30.0)
            _run(stage.cut)
            environment.rendezvous.set("is cut", b"")
        elif environment.rank in stage.survivors:
            environment.rendezvous.get("is cut", 40.0)
        else:
            # On its own thread, as the answer may come only when the cable is fixed.
            key = f"is about to reduce/{environment.rank}"
            threading.Thread(target=environment.rendezvous.set, args=(key, b"")).start()
        seen = _failed_allreduce(communicator, stage)
    return {**seen, **_go_on(environment, stage, communicator.name, revive=lambda: _run(stage.fix))}


def _cut_in_an_operation(environment: RankEnvironment, stage: Stage) -> Outcome:
    with (
        _open(environment, "cut in an operation") as communicator,
        _once_under_way(lambda: _run(stage.cut), on=environment.rank == 0),
    ):
        seen = _failed_allreduce(communicator, stage)
    return {**seen, **_go_on(environment, stage, communicator.name, revive=lambda: _run(stage.fix))}


def _cut_before_opening(environment: RankEnvironment, stage: Stage) -> Outcome:
    name = "cut before opening"
    environment.meet(name)
    if environment.rank == 0:
        _run(stage.cut)
    if environment.rank in stage.victims:
        assert eventually(lambda: not _has_carrier())
    timeout_s = _VICTIMS_PATIENCE_S if environment.rank in stage.victims else PATIENCE_S
    seen = error_of(lambda: environment.open(name=name, timeout_s=timeout_s))
    return {**seen, **_go_on(environment, stage, name, revive=lambda: _run(stage.fix))}


def _cut_for_good(environment: RankEnvironment, stage: Stage) -> Outcome:
    """The deadline of the operation is longer than the time after which a silent host counts as lost."""
    with _open(environment, "cut for good") as communicator:
        array = np.ones(_NUM_LARGE, np.float32)
        with _once_under_way(lambda: _run(stage.cut), on=environment.rank == 0):
            seen = error_of(lambda: communicator.allreduce(array, timeout_s=100.0))
    return {**seen, **_go_on(environment, stage, communicator.name, revive=lambda: _run(stage.fix))}


def _frozen_between_operations(environment: RankEnvironment, stage: Stage) -> Outcome:
    with _open(environment, "frozen between operations") as communicator:
        victims = _Victims(environment, stage, communicator.name)
        if environment.rank == 0:
            victims.freeze()
            environment.rendezvous.set("is frozen", b"")
        environment.rendezvous.get("is frozen", 30.0)
        seen = _failed_allreduce(communicator, stage)
    return {**seen, **_go_on(environment, stage, communicator.name, revive=victims.thaw)}


def _frozen_in_an_operation(environment: RankEnvironment, stage: Stage) -> Outcome:
    with _open(environment, "frozen in an operation") as communicator:
        victims = _Victims(environment, stage, communicator.name)
        with _once_under_way(victims.freeze, on=environment.rank == 0):
            seen = _failed_allreduce(communicator, stage)
    return {**seen, **_go_on(environment, stage, communicator.name, revive=victims.thaw)}


SCENES: dict[str, Callable[[RankEnvironment, Stage], Outcome]] = {
    "cut between operations": _cut_between_operations,
    "cut in an operation": _cut_in_an_operation,
    "cut before opening": _cut_before_opening,
    "cut for good": _cut_for_good,
    "frozen between operations": _frozen_between_operations,
    "frozen in an operation": _frozen_in_an_operation,
}


def killed(environment: RankEnvironment, stage: Stage) -> Outcome:
    """One of the victims is killed; other ranks on its host are survivors, too."""
    dead = stage.victims[-1]
    with _open(environment, "killed") as communicator:
        large = np.ones(_NUM_LARGE, np.float32)
        communicator.barrier()
        # A rank may leave the barrier while others are still in it.
        environment.rendezvous.set(f"rank {environment.rank} is past the barrier", b"")
        if environment.rank == dead:
            for rank in range(environment.world_size):
                environment.rendezvous.get(f"rank {rank} is past the barrier", 30.0)
            environment.rendezvous.set("killed at", str(time.monotonic()).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        seen = error_of(lambda: communicator.allreduce(large))
        seen["seconds"] = seen["at"] - float(environment.rendezvous.get("killed at", 5.0))
        seen["again"] = error_of(communicator.barrier)
    remaining = [rank for rank in range(environment.world_size) if rank != dead]
    return {**seen, "remaining total": _total_of(environment, remaining, "after the killing")}


def frozen_for_a_while(environment: RankEnvironment, stage: Stage, seconds: float) -> Outcome:
    """The victim is frozen in the middle of an operation and thawed before its deadline.

    In a broadcast the others keep sending until their buffers and the victim's are full.
    """
    with _open(environment, "frozen for a while") as communicator:
        victims = _Victims(environment, stage, communicator.name)

        def freeze_and_thaw() -> None:
            victims.freeze()
            threading.Event().wait(seconds)
            victims.thaw()

        array = np.full(_NUM_LARGE, environment.rank + 1, np.float32)
        start = time.monotonic()
        with _once_under_way(freeze_and_thaw, on=environment.rank == 0):
            communicator.broadcast(array, root=0, timeout_s=seconds + 20.0)
        return {"seconds": time.monotonic() - start, "values": np.unique(array).tolist()}


def garbage(environment: RankEnvironment, kind: str) -> Outcome:
    """The last rank authenticates properly, and then sends garbage on one kind of its connections."""
    name, last = f"garbage on the {kind}", environment.world_size - 1
    hosts = tuple(range(environment.world_size))
    if environment.rank == last:
        _send_garbage(environment, name, kind, hosts)
        seen = {}
    else:
        with environment.open(name=name, transport="tcp", host_of_rank=hosts) as communicator:
            seen = error_of(lambda: communicator.allreduce(np.ones(100), timeout_s=PATIENCE_S))
            environment.rendezvous.set(f"{name}/{environment.rank} has seen it", b"")
    return {**seen, "total": _total_of(environment, list(range(environment.world_size)), f"after {name}")}


def _send_garbage(environment: RankEnvironment, name: str, kind: str, hosts: tuple[int, ...]) -> None:
    """Connect as a communicator does, and send garbage."""
    rings = connect_rings(
        environment.rendezvous.view(f"communicator/{name}/1"),
        topology=Topology(rank=environment.rank, host_of_rank=hosts),
        secret=environment.secret,
        name=name,
        timeout_s=20.0,
    )
    sockets = {ring: [socket.socket(fileno=fd) for fd in fds] for ring, fds in rings.items()}
    try:
        for sock in sockets[kind]:
            sock.sendall(b"\x9f garbage" * 100)
        for rank in range(environment.rank):
            environment.rendezvous.get(f"{name}/{rank} has seen it", 20.0)
    finally:
        for sock in (*sockets["lane"], *sockets["lifeline"]):
            sock.close()


def _open(environment: RankEnvironment, name: str) -> Communicator:
    """Open a communicator; return when all ranks know that the others have opened it."""
    communicator = environment.open(name=name)
    communicator.barrier()
    environment.meet(f"{name}/is open")
    return communicator


def _failed_allreduce(communicator: Communicator, stage: Stage) -> Outcome:
    array = np.ones(_NUM_LARGE, np.float32)
    timeout_s = _VICTIMS_PATIENCE_S if communicator.rank in stage.victims else PATIENCE_S
    seen = error_of(lambda: communicator.allreduce(array, name="weights", timeout_s=timeout_s))
    seen["again"] = error_of(communicator.barrier)
    return seen


def _go_on(environment: RankEnvironment, stage: Stage, name: str, *, revive: Callable[[], None]) -> Outcome:
    """The survivors open a communicator without the victims; then rank 0 revives them, and all ranks open one."""
    outcome: Outcome = {}
    if environment.rank in stage.survivors:
        outcome["remaining total"] = _total_of(environment, stage.survivors, f"survivors of {name}")
    if environment.rank == 0:
        revive()
    outcome["total"] = _total_of(environment, list(range(environment.world_size)), f"all after {name}")
    return outcome


def _total_of(environment: RankEnvironment, members: list[int], name: str) -> float:
    """The result of an allreduce of ones on a new communicator of these ranks."""
    with open_communicator(
        rendezvous=environment.rendezvous,
        rank=members.index(environment.rank),
        world_size=len(members),
        secret=environment.secret,
        transport=environment.transport,
        timeout_s=30.0,
        name=name,
    ) as communicator:
        total = np.ones(100_000)
        communicator.allreduce(total)
    assert (total == total[0]).all()
    return float(total[0])


class _Victims:
    """The processes of the last host, which rank 0 freezes and thaws: all hosts share one pid namespace."""

    def __init__(self, environment: RankEnvironment, stage: Stage, name: str) -> None:
        self._pids: list[int] = []
        if environment.rank in stage.victims:
            environment.rendezvous.set(f"{name}/pid/{environment.rank}", str(os.getpid()).encode())
        if environment.rank == 0:
            keys = [f"{name}/pid/{rank}" for rank in stage.victims]
            self._pids = [int(environment.rendezvous.get(key, 20.0)) for key in keys]

    def freeze(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _once_under_way(act: Callable[[], None], *, on: bool) -> Iterator[None]:
    """While the body runs, call ``act`` as soon as this host has sent some megabytes."""
    failures: list[Exception] = []

    def wait_and_act() -> None:
        try:
            assert eventually(lambda: bytes_sent() - before > _UNDER_WAY_BYTES, timeout_s=10.0)
            act()
        except Exception as error:
            failures.append(error)

    before = bytes_sent()
    thread = threading.Thread(target=wait_and_act)
    if on:
        thread.start()
    yield
    if on:
        thread.join()
    if failures:
        raise failures[0]


def bytes_sent() -> int:
    """Number of bytes that this host has sent through its cable: the ninth number of an interface's line."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise AssertionError("this host has no cable")


def _has_carrier() -> bool:
    """Whether this host's cable is connected."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFFLAGS, struct.pack("16s16x", b"eth0"))
    (flags,) = struct.unpack("16xH14x", answer)
    return bool(flags & _IFF_RUNNING)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=10.0)
