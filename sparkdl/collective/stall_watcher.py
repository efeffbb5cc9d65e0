"""The thread that learns of stalls from the native core. Runs on ranks; asleep as long as there is none.

The core must not wait for Python, which may be busy or shutting down: it leaves its news where they can be fetched, and
writes to a descriptor that this thread reads.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from sparkdl.collective.stalls import numbered, warn_of_stall

if TYPE_CHECKING:
    from sparkdl import _native
    from sparkdl.collective.communicator import Communicator


class StallWatcher:
    """Reports the stalls of all native communicators of this process.

    Attributes:
        fd: an eventfd for the core to write to.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[_native.Monitor, str, int]] = {}
        self._num_watched = 0
        threading.Thread(target=self._run, name="sparkdl-stalls", daemon=True).start()

    def watch(self, communicator: Communicator, monitor: _native.Monitor) -> None:
        """Report the stalls that ``monitor`` has, as long as ``communicator`` lives."""
        with self._lock:
            self._num_watched += 1
            called = numbered(communicator.name, communicator.world_ranks)
            self._watched[self._num_watched] = (monitor, called, communicator.rank)
            weakref.finalize(communicator, self._watched.pop, self._num_watched).atexit = False

    def _run(self) -> None:
        while True:
            os.eventfd_read(self.fd)
            for monitor, name, rank in list(self._watched.values()):
                stall = monitor.take_stall()
                if stall is not None:
                    _, operation, waited_s, who = stall
                    warn_of_stall(name, rank, operation, waited_s, who)


_watchers: dict[int, StallWatcher] = {}
"""By process, as threads do not survive a fork."""

_making = threading.Lock()


def stall_watcher() -> StallWatcher:
    """The watcher of this process, started at first use."""
    with _making:
        process = os.getpid()
        if process not in _watchers:
            _watchers[process] = StallWatcher()
        return _watchers[process]
