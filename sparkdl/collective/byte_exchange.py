"""Broadcast, gather and allgather of byte strings of any length over a communicator, and agreement on an outcome."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sparkdl.errors import CommunicatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sparkdl.collective.communicator import Communicator

Result = TypeVar("Result")

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


def allgather_json(
    communicator: Communicator, value: Any, *, name: str = "", timeout_s: float | None = None
) -> list[Any]:
    """Return the values of all ranks, of types of JSON, in order of rank, on every rank; collective."""
    texts = allgather_bytes(communicator, json.dumps(value).encode(), name=name, timeout_s=timeout_s)
    return [json.loads(text) for text in texts]


def agree(
    exchange: Callable[[tuple[Any, Any]], list[Any]],
    work: Callable[[], Result],
    explain: Callable[[Mapping[int, Any]], Exception],
    *,
    of: type[Exception] | tuple[type[Exception], ...] = Exception,
    describe: Callable[[Exception], Any] = lambda error: [type(error).__name__, str(error)],
    raises_own: bool = False,
) -> list[Result]:
    """Call ``work`` on every rank and return all results; if it fails on a rank, all ranks raise an error. Collective.

    Args:
        exchange: collective function that returns the values of all ranks, in order of rank, on every rank.
        work: function whose result ``exchange`` can send.
        explain: function that returns the error to raise, from the descriptions of the errors by their ranks.
        of: classes of the errors that are exchanged; others are raised on this rank alone.
        describe: function that returns a description of an error that ``exchange`` can send; by default the name of
            its class, and its text.
        raises_own: whether a rank on which ``work`` failed raises its own error in place of the explained one.

    Raises:
        Exception: the error of ``explain``, with this rank's own as its cause if there is one.
    """
    result, failure, description = None, None, None
    try:
        result = work()
    except of as error:
        failure, description = error, describe(error)
    try:
        outcomes = exchange((result, description))
    except CommunicatorError:
        if failure is None or not raises_own:
            raise
    if failure is not None and raises_own:
        raise failure
    failures = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
    if failures:
        agreed = explain(failures)
        vars(agreed)["is_agreed"] = True  # for error_origin
        raise agreed from failure
    return [value for value, _ in outcomes]


def _gather_sizes(communicator: Communicator, value: bytes, name: str, timeout_s: float | None) -> _Sizes:
    sizes = np.zeros(communicator.world_size, np.int64)
    communicator.allgather(
        np.array([len(value)], np.int64), sizes, name=f"sizes of {name}", timeout_s=timeout_s
    )
    return sizes


def _cut(values: np.ndarray[Any, np.dtype[np.uint8]], sizes: _Sizes) -> list[bytes]:
    return [part.tobytes() for part in np.split(values, np.cumsum(sizes)[:-1])]
