"""Finding out which ranks share a host, by trying: those do that can read each other's file in ``/dev/shm``.

Names are never compared: two containers can share a host name or a boot id without sharing memory, and one
machine can go by two names. Runs on every rank, while a communicator opens.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING

from sparkdl.collective.deadline import Deadline
from sparkdl.collective.rendezvous import Rendezvous, all_gather_bytes
from sparkdl.collective.shared_files import SharedFile, open_shared, remove_leftovers
from sparkdl.topology import number_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOKEN_BYTES = 32


def find_hosts(rendezvous: Rendezvous, *, rank: int, world_size: int, timeout_s: float) -> tuple[int, ...]:
    """Find the host index of every rank, numbered by first appearance; all ranks get the same answer.

    A rank that has no ``/dev/shm`` counts as alone on its host.

    Raises:
        CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
    """
    if world_size == 1:
        return (0,)
    deadline = Deadline(timeout_s)
    remove_leftovers()
    token = secrets.token_bytes(_TOKEN_BYTES)
    with ExitStack() as stack:
        offer = json.dumps([_leave(token, stack), token.hex()]).encode()
        offers = all_gather_bytes(
            rendezvous,
            key="hosts/offers",
            rank=rank,
            world_size=world_size,
            value=offer,
            timeout_s=deadline.remaining_s(),
        )
        seen = [other for other in range(world_size) if other == rank or _can_read(offers[other])]
        # The files stay until everyone has said what it saw.
        sightings = all_gather_bytes(
            rendezvous,
            key="hosts/sightings",
            rank=rank,
            world_size=world_size,
            value=json.dumps(seen).encode(),
            timeout_s=deadline.remaining_s(),
        )
    return group_by_sight([set(json.loads(sighting)) for sighting in sightings])


def group_by_sight(seen: Sequence[set[int]]) -> tuple[int, ...]:
    """Group ranks so that within a group each sees every other; ``seen[r]`` holds the ranks that rank r sees.

    Sight need be neither mutual nor transitive (a user, a mount and a container each can stand in the way).
    Every rank computes this from the same sightings, so all of them agree.
    """
    groups: list[list[int]] = []
    host_of_rank = []
    for rank, sight in enumerate(seen):
        for host, members in enumerate(groups):
            if all(member in sight and rank in seen[member] for member in members):
                members.append(rank)
                host_of_rank.append(host)
                break
        else:
            groups.append([rank])
            host_of_rank.append(len(groups) - 1)
    return number_hosts(host_of_rank)


def _leave(token: bytes, stack: ExitStack) -> str:
    try:
        file = stack.enter_context(SharedFile("host"))
        os.write(file.fd, token)
    except OSError:
        return ""
    return str(file.path)


def _can_read(offer: bytes) -> bool:
    path, token = json.loads(offer)
    try:
        fd = open_shared(path, flags=os.O_RDONLY)
    except OSError:
        return False
    try:
        return secrets.compare_digest(os.read(fd, _TOKEN_BYTES), bytes.fromhex(token))
    finally:
        os.close(fd)
