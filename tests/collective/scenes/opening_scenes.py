"""Failures while ranks open a communicator, and what each rank sees of them. Runs on ranks."""

from __future__ import annotations

import os
import resource
import socket
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective import Address, RendezvousClient, new_secret, open_communicator
from tests.collective.scenes.failure_scenes import Outcome, error_of
from tests.collective.scenes.logged import logged_warnings
from tests.processes import listens_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.run_ranks import RankEnvironment


def wrong_secret(environment: RankEnvironment) -> Outcome:
    secret = environment.secret if environment.rank == 0 else new_secret()
    return error_of(
        lambda: open_communicator(
            rendezvous=environment.rendezvous,
            rank=environment.rank,
            world_size=environment.world_size,
            secret=secret,
            transport=environment.transport,
            timeout_s=3.0,
        )
    )


class WatchedRendezvous(RendezvousClient):
    """A rendezvous that shows the values that the ranks exchange for some purpose before the rank itself gets them."""

    purpose: str
    show: Callable[[list[bytes]], None]

    @classmethod
    def watch(
        cls, rendezvous: RendezvousClient, purpose: str, show: Callable[[list[bytes]], None]
    ) -> RendezvousClient:
        watched: Any = copy(rendezvous)
        watched.__class__, watched.purpose, watched.show = cls, purpose, show
        client: RendezvousClient = watched
        return client

    def exchange(self, key: str, **arguments: Any) -> list[bytes] | frozenset[int]:
        values = super().exchange(key, **arguments)
        if key == self.purpose and isinstance(values, list):
            self.show(values)
        return values


def where_it_listens(environment: RankEnvironment, host_of_rank: list[int] | None = None) -> list[str]:
    """The addresses on which the rank listens for its neighbours while it opens a communicator."""
    seen: set[str] = set()
    rendezvous = WatchedRendezvous.watch(
        environment.rendezvous,
        "connections/addresses",
        lambda _: seen.update(host for _, host in listens_on([os.getpid()])),
    )
    with open_communicator(
        rendezvous=rendezvous,
        rank=environment.rank,
        world_size=environment.world_size,
        secret=environment.secret,
        transport="tcp",
        host_of_rank=host_of_rank,
        timeout_s=20.0,
    ) as communicator:
        communicator.barrier()
    return sorted(seen)


def stranger_at_the_listener(environment: RankEnvironment) -> Outcome:
    """Rank 1 sends garbage to the port of rank 0 before it connects properly, and holds silent connections."""
    silent = []

    def bother(published: list[bytes]) -> None:
        _, address_of_rank_0 = published[0].split(b"\n")
        address = Address.from_bytes(address_of_rank_0)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 500, b"\x80\x04\x95", b"x"):
            with socket.create_connection((address.hosts[0], address.port)) as stranger:
                stranger.sendall(garbage)
        silent.extend(socket.create_connection((address.hosts[0], address.port)) for _ in range(100))

    rendezvous = environment.rendezvous
    if environment.rank == 1:
        rendezvous = WatchedRendezvous.watch(environment.rendezvous, "connections/addresses", bother)
    with open_communicator(
        rendezvous=rendezvous,
        rank=environment.rank,
        world_size=environment.world_size,
        secret=environment.secret,
        transport=environment.transport,
        timeout_s=20.0,
    ) as communicator:
        total = np.ones(1)
        communicator.allreduce(total)
    for stranger in silent:
        stranger.close()
    return {"total": total.tolist()}


def no_room_for_the_segment(environment: RankEnvironment) -> Outcome:
    """A limit on file sizes stands for a small /dev/shm: reserving the segment fails in the same place."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with logged_warnings() as warnings, environment.open(transport="auto", name="auto") as communicator:
        total = np.ones(3)
        communicator.allreduce(total)
    return {
        "total": total.tolist(),
        "hosts": communicator.topology.host_of_rank,
        "warnings": warnings,
        "shm": error_of(lambda: environment.open(transport="shm", name="shm")),
    }


def room_for_some_buffers(environment: RankEnvironment) -> Outcome:
    """A limit on file sizes leaves room for the segment and a small buffer, and not for a large one."""
    with logged_warnings() as warnings, environment.open(transport="shm") as communicator:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
        totals = []
        for num_bytes in (1 << 20, 64 << 20, 64 << 20):
            buffer = communicator.allocate(num_bytes)
            buffer += communicator.rank + 1
            communicator.allreduce(buffer)
            totals.append(np.unique(buffer).tolist())
    return {"totals": totals, "warnings": warnings}


def error_of_opening(
    environment: RankEnvironment, transport: str, host_of_rank: tuple[int, int] | None
) -> Outcome:
    return error_of(lambda: environment.open(transport=transport, host_of_rank=host_of_rank))
