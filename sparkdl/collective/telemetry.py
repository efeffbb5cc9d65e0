"""The monitors of a communicator and of the process sets made of it, which are measured together.

Runs on ranks; nothing here communicates.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from sparkdl.collective.monitor import Arrival, Lateness, OperationRecord, OperationTotals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sparkdl.collective.monitor import Monitor


class Watched(Protocol):
    """As much of a communicator as can be measured."""

    name: str
    monitor: Monitor

    @property
    def rank(self) -> int:
        """Number of this rank in the communicator."""

    @property
    def world_size(self) -> int:
        """How many ranks it has."""


@dataclass(kw_only=True)
class Measured:
    """What was measured of the communicators of one name: there may have been several, one after another.

    Attributes:
        name: of the communicator.
        world_size: how many ranks it has.
        rank: of this rank in it.
        totals: by kind of operation.
        lateness: by rank of the communicator.
        arrivals: at the latest operations of the communicator that is open.
    """

    name: str
    world_size: int
    rank: int
    totals: dict[str, OperationTotals] = field(default_factory=dict)
    lateness: dict[int, Lateness] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)

    def add(self, totals: Iterable[OperationTotals], lateness: Iterable[Lateness]) -> None:
        """Count in what a monitor tells."""
        for more in totals:
            known = self.totals.get(more.kind)
            self.totals[more.kind] = more if known is None else known.plus(more)
        for late in lateness:
            known_late = self.lateness.get(late.rank)
            self.lateness[late.rank] = late if known_late is None else known_late.plus(late)


@dataclass(kw_only=True)
class Recorded:
    """What the communicators of one name did while a recording ran: the latest of it, and how much had to go.

    Attributes:
        name: of the communicators.
        records: their operations.
        num_dropped: how many earlier operations are not there.
        marks: the latest of what :meth:`Telemetry.mark` was told, and when, in nanoseconds.
    """

    name: str
    records: list[OperationRecord] = field(default_factory=list)
    num_dropped: int = 0
    marks: deque[tuple[int, str]] = field(default_factory=deque)


class Telemetry:
    """Knows the communicators of a family. What was measured of one that is dropped, it keeps.

    All methods may be called from several threads at once.
    """

    def __init__(self) -> None:
        # Taken again where the garbage collector drops a communicator in the middle of a method.
        self._lock = threading.RLock()
        self._members: dict[int, _Member] = {}
        self._num_members = 0
        self._gone: dict[str, Measured] = {}
        self._recorded: dict[str, Recorded] = {}
        self._news: dict[str, Recorded] | None = None
        self._max_records = 0
        self._is_recording = False
        self._since = time.monotonic()

    def watch(self, communicator: Watched) -> None:
        """Take a communicator into the family."""
        with self._lock:
            self._num_members += 1
            number = self._num_members
            member = _Member(communicator)
            self._members[number] = member
            if self._is_recording:
                member.monitor.start_recording(self._max_records)
        weakref.finalize(communicator, self._let_go, number).atexit = False

    def measure(self, *, reset: bool = False) -> tuple[list[Measured], float]:
        """What was measured of every communicator, and in how many seconds.

        Args:
            reset: count from zero again afterwards.
        """
        with self._lock:
            found: dict[str, Measured] = {}
            for gone in self._gone.values():
                found[gone.name] = replace(gone, totals=dict(gone.totals), lateness=dict(gone.lateness))
            for member in list(self._members.values()):
                member.tell(found)
                if reset:
                    member.reset()
            now = time.monotonic()
            seconds = now - self._since
            if reset:
                self._gone, self._since = {}, now
            return list(found.values()), seconds

    def start_recording(self, max_records: int, *, has_news: bool = False) -> None:
        """Have every communicator, also those to come, write its operations down.

        Args:
            max_records: how many of each are kept, the latest ones.
            has_news: whether :meth:`take_news` will be called.
        """
        with self._lock:
            self._is_recording, self._max_records, self._recorded = True, max_records, {}
            self._news = {} if has_news else None
            for member in list(self._members.values()):
                member.monitor.start_recording(max_records)

    def mark(self, name: str, what: str) -> None:
        """Write down that something happens now, as long as a recording runs.

        Args:
            name: of the communicators among whose operations it belongs.
            what: the mark's text.
        """
        with self._lock:
            if self._is_recording:
                now_ns = time.monotonic_ns()
                for place in self._places(name):
                    place.marks.append((now_ns, what))
                    if len(place.marks) > self._max_records:
                        place.marks.popleft()

    def take_news(self) -> list[Recorded]:
        """What was written down since this was called last; :meth:`stop_recording` gives it again."""
        with self._lock:
            if self._is_recording:
                for member in list(self._members.values()):
                    self._collect(member)
            news, self._news = self._news, {}
            return list((news or {}).values())

    def stop_recording(self) -> list[Recorded]:
        """End the recording; what was written down by every communicator."""
        with self._lock:
            self._is_recording = False
            for member in list(self._members.values()):
                member.monitor.stop_recording()
                self._collect(member)
            recorded, self._recorded, self._news = self._recorded, {}, None
            return list(recorded.values())

    def _let_go(self, number: int) -> None:
        with self._lock:
            member = self._members.pop(number)
            member.tell(self._gone)
            if self._is_recording:
                self._collect(member)

    def _collect(self, member: _Member) -> None:
        records, num_dropped = member.monitor.take_records()
        for place in self._places(member.name):
            place.records += map(OperationRecord._make, records)
            excess = max(0, len(place.records) - self._max_records)
            del place.records[:excess]
            place.num_dropped += num_dropped + excess

    def _places(self, name: str) -> list[Recorded]:
        """Where is written down what communicators of a name do."""
        kept = [self._recorded] if self._news is None else [self._recorded, self._news]
        return [places.setdefault(name, Recorded(name=name)) for places in kept]


class _Member:
    """One communicator, whose monitor counts on where the reports begin anew."""

    def __init__(self, communicator: Watched) -> None:
        self.name = communicator.name
        self.world_size = communicator.world_size
        self.rank = communicator.rank
        self.monitor = communicator.monitor
        self._totals_before: dict[str, OperationTotals] = {}
        self._lateness_before: dict[int, Lateness] = {}
        self._since_ns = 0

    def tell(self, found: dict[str, Measured]) -> None:
        fresh = Measured(name=self.name, world_size=self.world_size, rank=self.rank)
        place = found.setdefault(self.name, fresh)
        place.world_size, place.rank = self.world_size, self.rank
        totals = [self._since_reset(more) for more in map(OperationTotals._make, self.monitor.totals())]
        lateness = map(Lateness._make, self.monitor.lateness())
        place.add(
            (more for more in totals if more.num_operations or more.num_failed),
            (
                late.minus(self._lateness_before.get(late.rank, Lateness(late.rank, 0, 0)))
                for late in lateness
            ),
        )
        arrivals = map(Arrival._make, self.monitor.arrivals())
        place.arrivals = [arrival for arrival in arrivals if arrival.time_ns >= self._since_ns]

    def reset(self) -> None:
        self._totals_before = {more[0]: OperationTotals._make(more) for more in self.monitor.totals()}
        self._lateness_before = {late[0]: Lateness._make(late) for late in self.monitor.lateness()}
        self._since_ns = time.monotonic_ns()

    def _since_reset(self, totals: OperationTotals) -> OperationTotals:
        before = self._totals_before.get(totals.kind)
        return totals if before is None else totals.minus(before)
