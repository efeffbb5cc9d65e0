"""The stall inspector: warns of ranks that have not joined an operation, and lists what this process waits in.

A rank that has waited in an operation for long finds out which ranks are missing and logs a warning, repeatedly; the
operation continues, unless it is to be given up after some time.

The list of the operations in which this process waits for other ranks at the moment, whatever transport carries the
data, is for programs that observe the ranks from outside. Making it communicates nothing and ends no operation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from sparkdl.errors import ParamError
from sparkdl.rendezvous.deadline import MAX_TIMEOUT_S
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from types import TracebackType

    from sparkdl import _native
    from sparkdl.collective.communicator import Communicator


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StallCheck:
    """When an operation that some ranks do not join is reported, and given up.

    Attributes:
        warn_after_s: seconds without progress until a warning, and between warnings; None for never.
        abort_after_s: seconds without progress until the operation fails; None for its deadline alone.
    """

    warn_after_s: float | None = 60.0
    abort_after_s: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if seconds is not None and not seconds > 0:
                raise ParamError(f"{name} must be positive or None, got {seconds}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> StallCheck:
        """The stall check of Horovod's variables, with Horovod's defaults.

        They are ``HOROVOD_STALL_CHECK_DISABLE``, ``HOROVOD_STALL_CHECK_TIME_SECONDS`` and
        ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, of which 0 stands for never.

        Raises:
            ParamError: if one of them is no number, or the time to the check is not positive.
        """
        if _number(environment, "HOROVOD_STALL_CHECK_DISABLE", 0.0) > 0:
            return cls(warn_after_s=None)
        return cls(
            warn_after_s=_number(environment, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
            abort_after_s=_number(environment, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or None,
        )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        return float(text) if text else default
    except ValueError as error:
        raise ParamError(f"{name} must be a number, got {text!r}") from error


class StallTimer:
    """For transports in Python: runs while an operation makes no progress."""

    def __init__(self, check: StallCheck) -> None:
        self._check = check
        self._began = time.monotonic()
        self._num_warnings = 0

    @property
    def waited_s(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self._began

    @property
    def warning_is_due(self) -> bool:
        """Whether it is time for a warning; says so once for each."""
        after_s = self._check.warn_after_s
        if after_s is None or self.waited_s < after_s * (self._num_warnings + 1):
            return False
        self._num_warnings += 1
        return True

    @property
    def is_over(self) -> bool:
        """Whether the operation has to be given up."""
        after_s = self._check.abort_after_s
        return after_s is not None and self.waited_s >= after_s


def numbered(name: str, world_ranks: Sequence[int]) -> str:
    """The name of a communicator in warnings, with the world's numbers of its ranks if these differ.

    Args:
        name: of the communicator.
        world_ranks: its ranks, by their numbers in the world.
    """
    if list(world_ranks) == list(range(len(world_ranks))):
        return repr(name)
    own = name_ranks(range(len(world_ranks)))
    return f"{name!r} (its {own} are {', '.join(map(str, world_ranks))} of the world)"


def warn_of_stall(communicator: str, rank: int, operation: str, waited_s: float, who: str) -> None:
    """Log that a rank has waited long.

    Args:
        communicator: what to call it.
        rank: the one that waits.
        operation: the one that it waits in.
        waited_s: for how long.
        who: the missing ranks, in words.
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
    """One operation that does not continue."""

    communicator: str
    """Its name; that of a process set begins with its parent's, as in ``world/pair``."""

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
        operation: the one that is waited in, in words.
        timeout_s: its deadline.
    """

    def __init__(self, communicator: str, ranks: Sequence[int], operation: str, timeout_s: float) -> None:
        self._since = time.monotonic()
        self._told = (communicator, tuple(ranks), operation), timeout_s
        with _lock:
            _noted.add(self)

    def end(self) -> None:
        """End the wait. May be called again."""
        with _lock:
            _noted.discard(self)

    def snapshot(self) -> Wait:
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
    """Include the waits of the native core of ``communicator``, as long as that exists."""
    with _lock:
        _native_ones[communicator] = monitor


def pending_waits() -> list[Wait]:
    """All waits of this process, the longest first."""
    with _lock:
        native_ones, noted = list(_native_ones.items()), list(_noted)
    waits = [wait.snapshot() for wait in noted]
    for communicator, monitor in native_ones:
        waits += [Wait(communicator.name, communicator.world_ranks, *wait) for wait in monitor.waits()]
    # A thread that listens for messages does not wait for an operation.
    waits = [wait for wait in waits if wait.timeout_s < MAX_TIMEOUT_S]
    return sorted(waits, key=lambda wait: -wait.waited_s)
