"""Measurements of the network between ranks on several hosts. Runs on ranks."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective import Address
from sparkdl.rendezvous.addresses import listen
from tests.hosts.failure_scenes import bytes_sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment

_PIECE_BYTES = 1 << 20


def rates(environment: RankEnvironment, num_bytes: int, num_repetitions: int) -> dict[str, Any]:
    """Time allreduces of float32, and plain copies of as many bytes to the next host over a socket.

    Returns:
        ``allreduce_s`` and ``copy_s``: the minimum of each, as other work on the machine only adds to them.
    """
    with environment.open() as communicator:
        array = np.ones(num_bytes // 4, np.float32)
        world_size = communicator.world_size
        allreduces, copies = [], []
        with _PlainRing(environment, communicator, num_bytes) as plain:
            for _ in range(num_repetitions):
                array[:] = communicator.rank + 1
                communicator.barrier()
                start = time.perf_counter()
                communicator.allreduce(array)
                allreduces.append(time.perf_counter() - start)
                assert array[0] == array[-1] == world_size * (world_size + 1) / 2
                communicator.barrier()
                copies.append(plain.copy_s())
        return {
            "hosts": communicator.topology.host_of_rank,
            "allreduce_s": min(allreduces),
            "copy_s": min(copies),
        }


def moved(environment: RankEnvironment, num_bytes: int, cases: Sequence[tuple[str, str, str]]) -> list[int]:
    """The number of bytes that this host sends in each of some collectives with a transport and a wire.

    Args:
        environment: environment of this rank.
        num_bytes: size of the array of float32 or, with blocks, of all blocks together.
        cases: operation, transport and wire of each collective.
    """
    sent = []
    for operation, transport, wire in cases:
        environment.meet(f"before {operation} by {transport} in {wire}")
        before = bytes_sent()
        _move(environment, num_bytes, operation, transport, wire)
        environment.meet(f"after {operation} by {transport} in {wire}")
        sent.append(bytes_sent() - before)
    return sent


def _move(environment: RankEnvironment, num_bytes: int, operation: str, transport: str, wire: str) -> None:
    with environment.open(transport=transport, wire=wire) as communicator:
        world_size = communicator.world_size
        whole = np.ones(num_bytes // 4, np.float32)
        block = np.ones(whole.size // world_size, np.float32)
        if operation == "allreduce":
            communicator.allreduce(whole)
        elif operation == "broadcast":
            communicator.broadcast(whole, root=0)
        elif operation == "allgather":
            communicator.allgather(block, whole)
        else:
            communicator.reduce_scatter(whole, block)


class _PlainRing:
    """Sockets between neighbouring ranks on different hosts, without any code of sparkdl."""

    def __init__(self, environment: RankEnvironment, communicator: Communicator, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        rank, world_size, rendezvous = communicator.rank, communicator.world_size, environment.rendezvous
        hosts = communicator.topology.host_of_rank
        next_rank = (rank + 1) % world_size
        self._to_next: socket.socket | None = None
        self._from_previous: socket.socket | None = None
        listeners, address = listen()
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
            rendezvous.set(f"plain/{rank}", address.to_bytes())
            if hosts[next_rank] != hosts[rank]:
                there = Address.from_bytes(rendezvous.get(f"plain/{next_rank}", 20.0))
                self._to_next = socket.create_connection((there.hosts[0], there.port), 20.0)
                self._to_next.settimeout(None)
            if hosts[rank - 1] != hosts[rank]:
                ready, _, _ = select.select(listeners, [], [], 20.0)
                self._from_previous, _ = ready[0].accept()

    def copy_s(self) -> float:
        """Seconds until all bytes have been sent to the next host and as many received from the previous one."""
        start = time.perf_counter()
        sending = threading.Thread(target=self._send)
        sending.start()
        left, piece = self._num_bytes, bytearray(_PIECE_BYTES)
        while left and self._from_previous is not None:
            left -= self._from_previous.recv_into(piece, min(left, _PIECE_BYTES))
        sending.join()
        return time.perf_counter() - start

    def _send(self) -> None:
        piece = bytes(_PIECE_BYTES)
        for _ in range(self._num_bytes // _PIECE_BYTES if self._to_next is not None else 0):
            self._to_next.sendall(piece)

    def __enter__(self) -> _PlainRing:
        return self

    def __exit__(self, *exception: object) -> None:
        for sock in (self._to_next, self._from_previous):
            if sock is not None:
                sock.close()
