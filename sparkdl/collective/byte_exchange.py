"""Broadcast, gather and allgather of byte strings of any length over a communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator

_Sizes = np.ndarray[Any, np.dtype[np.int64]]


def broadcast_bytes(
    communicator: Communicator, value: bytes, *, root: int, name: str = "", timeout_s: float | None = None
) -> bytes:
    """Return rank ``root``'s value on every rank; collective."""
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
    """Return the values of all ranks, in order of rank, on rank ``root``; an empty list on the others. Collective."""
    sizes = _gather_sizes(communicator, value, name, timeout_s)
    out = np.empty(sizes.sum(), np.uint8) if communicator.rank == root else None
    communicator.gather(
        np.frombuffer(value, np.uint8),
        out,
        root=root,
        counts=sizes.tolist(),
        name=name,
        timeout_s=timeout_s,
    )
    return [] if out is None else _cut(out, sizes)


def allgather_bytes(
    communicator: Communicator, value: bytes, *, name: str = "", timeout_s: float | None = None
) -> list[bytes]:
    """Return the values of all ranks, in order of rank, on every rank; collective."""
    sizes = _gather_sizes(communicator, value, name, timeout_s)
    out = np.empty(sizes.sum(), np.uint8)
    communicator.allgather(
        np.frombuffer(value, np.uint8), out, counts=sizes.tolist(), name=name, timeout_s=timeout_s
    )
    return _cut(out, sizes)


def _gather_sizes(communicator: Communicator, value: bytes, name: str, timeout_s: float | None) -> _Sizes:
    sizes = np.zeros(communicator.world_size, np.int64)
    communicator.allgather(
        np.array([len(value)], np.int64), sizes, name=f"sizes of {name}", timeout_s=timeout_s
    )
    return sizes


def _cut(values: np.ndarray[Any, np.dtype[np.uint8]], sizes: _Sizes) -> list[bytes]:
    return [part.tobytes() for part in np.split(values, np.cumsum(sizes)[:-1])]
