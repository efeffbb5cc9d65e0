"""Stall inspector: warns of ranks that have not joined an operation, and lists the waits of this process.

A rank that has waited long in an operation finds out which ranks are missing and logs a warning, repeatedly. The
operation continues, unless a :class:`StallCheck` limits the time without progress.

:func:`pending_waits` lists the operations in which this process currently waits for other ranks, over any transport.
The list is for programs that observe the ranks from outside. Listing the waits neither communicates nor ends an
operation.

The native core must not wait for Python, which may be busy or shutting down. It stores a description of a stall, and
writes to a descriptor that a thread reads. The thread sleeps as long as there is no stall.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from sparkdl.errors import CommunicatorTimeoutError, ParamError
from sparkdl.rendezvous.deadline import MAX_TIMEOUT_S
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from sparkdl import _native
    from sparkdl.collective.communicator import Communicator


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StallCheck:
    """When to report, and when to give up, an operation that some ranks do not join.

    Attributes:
        warn_after_s: seconds without progress until a warning, and between warnings; None for no warnings.
        abort_after_s: seconds without progress until the operation fails; when None, it fails only at its deadline.
    """

    warn_after_s: float | None = 60.0
    abort_after_s: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if seconds is not None and not seconds > 0:
                raise ParamError(f"{name} must be positive or None, got {seconds}")


class StallTimer:
    """Measures how long an operation has made no progress; for transports in Python."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._num_warnings = 0

    def check(self, communicator: Communicator, operation: object, find_missing: Callable[[], str]) -> None:
        """Warn of a stall if a warning is due.

        Args:
            communicator: communicator of the operation.
            operation: description of the operation.
            find_missing: function that describes the missing ranks.

        Raises:
            CommunicatorTimeoutError: if the operation has stalled for too long.
        """
        check, waited_s = communicator.stall_check, time.monotonic() - self._began
        is_over = check.abort_after_s is not None and waited_s >= check.abort_after_s
        after_s = math.inf if check.warn_after_s is None else check.warn_after_s * (self._num_warnings + 1)
        if not is_over and waited_s < after_s:
            return
        called, missing = describe_communicator(communicator.name, communicator.world_ranks), find_missing()
        if is_over:
            raise CommunicatorTimeoutError(
                f"{operation} on {called} stalled for {check.abort_after_s:g} s: {missing}"
            )
        self._num_warnings += 1
        warn_of_stall(called, communicator.rank, str(operation), waited_s, missing)


def describe_communicator(name: str, world_ranks: Sequence[int]) -> str:
    """Return the name of a communicator for warnings, with the world ranks of its ranks if these differ.

    Args:
        name: name of the communicator.
        world_ranks: world rank of each of its ranks.
    """
    if list(world_ranks) == list(range(len(world_ranks))):
        return repr(name)
    ranks = name_ranks(range(len(world_ranks)))
    return f"{name!r} (its {ranks} are {', '.join(map(str, world_ranks))} of the world)"


def warn_of_stall(communicator: str, rank: int, operation: str, waited_s: float, who: str) -> None:
    """Log a warning that a rank has waited long in an operation.

    Args:
        communicator: name of the communicator, as :func:`describe_communicator` returns it.
        rank: waiting rank.
        operation: description of the operation.
        waited_s: seconds that the rank has waited.
        who: description of the missing ranks.
    """
    logger.warning(
        "Rank %d has waited %.3g s in %s on %s: %s. Look at what those ranks are doing: all ranks have to call the"
        " same operations in the same order.",
        rank,
        waited_s,
        operation,
        communicator,
        who,
    )


class Wait(NamedTuple):
    """A wait for other ranks in one operation."""

    communicator: str
    """Name of the communicator; the name of a process set begins with its parent's, as in ``world/pair``."""

    ranks: tuple[int, ...]
    """World rank of each rank of the communicator."""

    operation: str
    waited_s: float

    timeout_s: float
    """Timeout of the operation, in seconds."""


class _NativeCore(NamedTuple):
    monitor: _native.Monitor
    communicator: str
    world_ranks: tuple[int, ...]
    rank: int


_lock = threading.Lock()
_cores: dict[int, _NativeCore] = {}
_numbers = itertools.count()
_noted: set[NotedWait] = set()

os.register_at_fork(after_in_child=_cores.clear)  # a forked child has none of the cores' threads


class NotedWait(AbstractContextManager["NotedWait"]):
    """A wait of Python code, from the creation of this object to :meth:`end`; also a context manager.

    Args:
        communicator: name of the communicator.
        ranks: world rank of each of its ranks, or of the two ends of a message.
        operation: description of the operation.
        timeout_s: timeout of the operation, in seconds.
    """

    def __init__(self, communicator: str, ranks: Sequence[int], operation: str, timeout_s: float) -> None:
        self._since = time.monotonic()
        self._wait = (communicator, tuple(ranks), operation), timeout_s
        with _lock:
            _noted.add(self)

    def end(self) -> None:
        """End the wait. May be called again."""
        with _lock:
            _noted.discard(self)

    def snapshot(self) -> Wait:
        """Return the wait as it is at this moment."""
        what, timeout_s = self._wait
        return Wait(*what, time.monotonic() - self._since, timeout_s)

    def __exit__(self, *_: object) -> None:
        self.end()


def watch_native(communicator: Communicator, monitor: _native.Monitor) -> None:
    """Report the stalls and list the waits of a communicator's native core, until the communicator is dropped."""
    number = next(_numbers)
    _cores[number] = _NativeCore(monitor, communicator.name, communicator.world_ranks, communicator.rank)
    weakref.finalize(communicator, _cores.pop, number, None).atexit = False


@cache
def stall_fd(_process: int) -> int:
    """Start the thread that reports the stalls of native cores; return the eventfd to which they write.

    Args:
        _process: number of this process, as threads do not survive a fork.
    """
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    threading.Thread(target=_report_stalls, args=[fd], name="sparkdl-stalls", daemon=True).start()
    return fd


def _report_stalls(fd: int) -> None:
    while True:
        os.eventfd_read(fd)
        for core in list(_cores.values()):
            stall = core.monitor.take_stall()
            if stall is not None:
                _, operation, waited_s, who = stall
                called = describe_communicator(core.communicator, core.world_ranks)
                warn_of_stall(called, core.rank, operation, waited_s, who)


def pending_waits() -> list[Wait]:
    """Return all current waits of this process, the longest first."""
    with _lock:
        noted = list(_noted)
    waits = [wait.snapshot() for wait in noted]
    for core in list(_cores.values()):
        waits += [Wait(core.communicator, core.world_ranks, *wait) for wait in core.monitor.waits()]
    # A thread that listens for messages, with the longest timeout, does not wait for an operation.
    waits = [wait for wait in waits if wait.timeout_s < MAX_TIMEOUT_S]
    return sorted(waits, key=lambda wait: -wait.waited_s)
