"""What this process waits in for other ranks at the moment, whatever carries the data. Runs on ranks.

For who watches over the ranks from outside. Nothing here communicates, and nothing is ended over it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from sparkdl.collective.deadline import MAX_TIMEOUT_S

if TYPE_CHECKING:
    from types import TracebackType

    from sparkdl import _native
    from sparkdl.collective.communicator import Communicator


class Wait(NamedTuple):
    """One operation that does not go on."""

    communicator: str
    """Its name; a process set's says of what it is a part, as in ``world/pair``."""

    ranks: tuple[int, ...]
    """The communicator's ranks, by their numbers in the world."""

    operation: str
    waited_s: float

    timeout_s: float
    """The operation's own deadline."""


_lock = threading.Lock()
_native_ones: WeakKeyDictionary[Communicator, _native.Monitor] = WeakKeyDictionary()
_noted: set[NotedWait] = set()


class NotedWait:
    """A wait of code in Python, from its creation to :meth:`end`; also a context manager.

    Args:
        communicator: name of the communicator.
        ranks: its ranks, by their numbers in the world.
        operation: that is waited in, in words.
        timeout_s: its deadline.
    """

    def __init__(self, communicator: str, ranks: Sequence[int], operation: str, timeout_s: float) -> None:
        self._since = time.monotonic()
        self._told = (communicator, tuple(ranks), operation), timeout_s
        with _lock:
            _noted.add(self)

    def end(self) -> None:
        """It goes on. May be called again."""
        with _lock:
            _noted.discard(self)

    def tell(self) -> Wait:
        """What it is, at this moment."""
        what, timeout_s = self._told
        return Wait(*what, time.monotonic() - self._since, timeout_s)

    def __enter__(self) -> NotedWait:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def watch_native(communicator: Communicator, monitor: _native.Monitor) -> None:
    """Take in what the native core waits in for ``communicator``, as long as that lives."""
    with _lock:
        _native_ones[communicator] = monitor


def pending_waits() -> list[Wait]:
    """All that this process waits in, the longest wait first."""
    with _lock:
        native_ones, noted = list(_native_ones.items()), list(_noted)
    waits = [wait.tell() for wait in noted]
    for communicator, monitor in native_ones:
        waits += [Wait(communicator.name, communicator.world_ranks, *wait) for wait in monitor.waits()]
    # Who only listens for messages, in a thread, has nothing to wait for.
    waits = [wait for wait in waits if wait.timeout_s < MAX_TIMEOUT_S]
    return sorted(waits, key=lambda wait: -wait.waited_s)
