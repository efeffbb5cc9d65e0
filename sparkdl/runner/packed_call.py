"""The call that is sent to the ranks: a function with its arguments, or a script with its command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from sparkdl.launch.wire.messages import pickle_call
from sparkdl.runner.script import Script, read_script


class PackedCall:
    """A call that is pickled once, on the driver, so that an error names what cannot be pickled.

    Unpickling it returns the :class:`Call`.

    Args:
        function: function to call on the ranks.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.

    Raises:
        SerializationError: if something cannot be pickled; the message names it.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._payload = pickle_call(function, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._payload,)


@dataclass(frozen=True)
class Call:
    """The unpickled call on a *rank*."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Call the function and return its value."""
        return self.function(*self.args, **self.kwargs)


def pack(
    train: Callable[..., Any] | str | os.PathLike[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PackedCall | Script:
    """Pickle a function with its arguments, or read a script.

    Raises:
        ParamError: if ``train`` is neither a function nor the path of a Python file that can be read.
        SerializationError: if a function or its arguments cannot be pickled.
    """
    if isinstance(train, str | os.PathLike) or not callable(train):
        return read_script(train, args, kwargs)
    return PackedCall(train, args, kwargs)


def _unpack(payload: bytes) -> Call:
    return Call(*cloudpickle.loads(payload))
