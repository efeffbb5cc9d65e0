"""A pickled call for a rank, and the modules that the rank has to import for it."""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, set[str]]:
    """Pickle ``(fn, args)``; the second value names the modules of the functions and classes in it."""
    stream = io.BytesIO()
    pickler = _ModuleNotingPickler(stream)
    pickler.dump((fn, args))
    return stream.getvalue(), pickler.modules & sys.modules.keys()


class _ModuleNotingPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.modules: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        """Note the module of a value that is pickled by its name; pickling itself is unchanged."""
        if isinstance(value, (type, FunctionType)):
            self.modules.add(value.__module__)
