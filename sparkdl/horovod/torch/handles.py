"""Horovod's handles: numbers of operations that were started and not yet synchronized."""

from __future__ import annotations

import itertools
from typing import Any

from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Request, Result
from sparkdl.horovod.torch.names import HorovodInternalError

_handles: dict[int, tuple[Engine, Request[Any]]] = {}
_numbers = itertools.count(1)
_of_earlier_worlds: set[int] = set()
"""Handles that had not been synchronized when their world ended."""


def run_later(engine: Engine, request: Request[Any]) -> int:
    """Start a request and return its handle.

    Raises:
        ValueError: if a request of the same name is outstanding.
        HorovodInternalError: if the engine has failed.
    """
    engine.submit(request)
    handle = next(_numbers)
    _handles[handle] = (engine, request)
    return handle


def run_now(engine: Engine, request: Request[Result]) -> Result:
    """Run a request and return its result.

    Raises:
        ValueError: if a request of the same name is outstanding.
        HorovodInternalError: if the request fails.
    """
    engine.submit(request, will_wait=True)
    engine.wait(request)
    return request.result()


def poll(handle: int) -> bool:
    """Whether the operation of this handle is complete, so that ``synchronize`` would return at once.

    Raises:
        ValueError: if the handle is unknown, or has been synchronized.
    """
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _handles[handle][1].is_complete()


def synchronize(handle: int) -> Any:
    """Wait for the operation of this handle.

    Returns:
        The output: a tensor; for a grouped operation a tuple of tensors; for an alltoall the tensor and the received
        splits. None if the handle is unknown, or has been synchronized.

    Raises:
        HorovodInternalError: if the operation failed, or was not synchronized before ``shutdown``.
    """
    if handle in _of_earlier_worlds:
        raise HorovodInternalError(
            f"Horovod has been shut down. The operation of handle {handle} had not been synchronized before, and its "
            "result is dropped; call hvd.synchronize before hvd.shutdown."
        )
    if handle not in _handles:
        return None
    engine, request = _handles[handle]
    try:
        engine.wait(request)
    finally:
        _handles.pop(handle, None)
    return request.result()


def forget_handles() -> None:
    """Drop all handles and the tensors that they keep; synchronizing one of them is an error from now on."""
    _of_earlier_worlds.update(_handles)
    _handles.clear()
