"""Ranks as forked children that inherit a memfd and socket pairs: the raw extension needs no rendezvous."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from sparkdl import _native

TIMEOUT_S = 20.0
RankFunction = Callable[[_native.Communicator, int], Any]


class World:
    """The descriptors of all ranks, created before the ranks are forked."""

    def __init__(self, host_of_rank: Sequence[int], timeout_s: float = TIMEOUT_S) -> None:
        self.host_of_rank = list(host_of_rank)
        self.timeout_s = timeout_s
        self.size = len(self.host_of_rank)
        hosts = [[r for r in range(self.size) if host_of_rank[r] == h] for h in range(max(host_of_rank) + 1)]
        self._segments = [self._make_segment(len(ranks)) if len(ranks) > 1 else -1 for ranks in hosts]
        self._lifelines = self._make_ring(list(range(self.size)))
        self._lanes: dict[int, tuple[int, int]] = {}
        if len(hosts) > 1:
            for lane in range(min(len(ranks) for ranks in hosts)):
                self._lanes |= self._make_ring([ranks[lane] for ranks in hosts])

    @staticmethod
    def _make_segment(local_size: int) -> int:
        fd = os.memfd_create("segment")
        os.posix_fallocate(fd, 0, _native.segment_bytes(local_size))
        return fd

    @staticmethod
    def _make_ring(ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
        if len(ranks) == 1:
            return {}
        pairs = [socket.socketpair() for _ in ranks]
        return {rank: (pairs[i][0].detach(), pairs[i - 1][1].detach()) for i, rank in enumerate(ranks)}

    def open(self, rank: int) -> _native.Communicator:
        """Open one rank's communicator and close the descriptors of the others."""
        segment = self._segments[self.host_of_rank[rank]]
        lanes = self._lanes.pop(rank, (-1, -1))
        lifelines = self._lifelines.pop(rank, (-1, -1))
        self.close(keep=segment)
        return _native.Communicator(
            rank=rank,
            host_of_rank=self.host_of_rank,
            segment_fd=segment,
            lane_fds=lanes,
            lifeline_fds=lifelines,
            timeout_s=self.timeout_s,
        )

    def close(self, keep: int = -1) -> None:
        fds = [fd for pair in (*self._lanes.values(), *self._lifelines.values()) for fd in pair]
        for fd in fds + [fd for fd in self._segments if fd not in (-1, keep)]:
            os.close(fd)


def _child(world: World, rank: int, function: RankFunction, pipe: Connection) -> None:
    try:
        communicator = world.open(rank)
        result: Any = function(communicator, rank)
        communicator.close()
        pipe.send((result, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def fork_ranks(world: World, function: RankFunction, *, dies: Sequence[int] = ()) -> list[Any]:
    """Run a function on every rank, each in its own process; return the results in the order of ranks."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world.size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(world, rank, function, sender))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    world.close()
    results: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            if rank in dies:
                results.append(None)
                continue
            assert pipe.poll(2 * TIMEOUT_S), f"rank {rank} does not answer"
            result, error = pipe.recv()
            assert error is None, f"rank {rank} failed:\n{error}"
            results.append(result)
    finally:
        for process in processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
    return results
