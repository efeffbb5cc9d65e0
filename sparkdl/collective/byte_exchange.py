"""Bytes of any length from one rank to all, and from all to one, over a communicator. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator


def broadcast_bytes(
    communicator: Communicator, value: bytes, *, root: int, name: str = "", timeout_s: float | None = None
) -> bytes:
    """Rank ``root``'s value, on every rank; collective."""
    size = np.array([len(value)], np.int64)
    communicator.broadcast(size, root=root, name=f"size of {name}", timeout_s=timeout_s)
    data = np.zeros(size[0], np.uint8)
    if communicator.rank == root:
        data[:] = np.frombuffer(value, np.uint8)
    communicator.broadcast(data, root=root, name=name, timeout_s=timeout_s)
    return data.tobytes()


def gather_bytes(
    communicator: Communicator, value: bytes, *, root: int, name: str = "", timeout_s: float | None = None
) -> list[bytes]:
    """Every rank's value in order of rank, on rank ``root``; nothing on the others. Collective."""
    sizes = np.zeros(communicator.world_size, np.int64)
    communicator.allgather(
        np.array([len(value)], np.int64), sizes, name=f"sizes of {name}", timeout_s=timeout_s
    )
    out = np.empty(sizes.sum(), np.uint8) if communicator.rank == root else None
    communicator.gather(
        np.frombuffer(value, np.uint8),
        out,
        root=root,
        counts=sizes.tolist(),
        name=name,
        timeout_s=timeout_s,
    )
    if out is None:
        return []
    return [part.tobytes() for part in np.split(out, np.cumsum(sizes)[:-1])]
