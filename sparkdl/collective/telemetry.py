"""The monitors of a communicator and of the process sets made of it, which are measured together.

Runs on ranks; nothing here communicates.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sparkdl.collective.monitor import Arrival, Lateness, OperationRecord, OperationTotals
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sparkdl.collective.monitor import Monitor


class Watched(Protocol):
    """As much of a communicator as can be measured.

    Attributes:
        name: what it is called.
        world_ranks: its ranks, by their numbers in the first communicator of the family.
        monitor: what tells of its operations.
    """

    name: str
    world_ranks: tuple[int, ...]
    monitor: Monitor


class Place(NamedTuple):
    """What tells communicators of a family apart: process sets of different ranks may have the same name.

    Attributes:
        name: of the communicator.
        ranks: its ranks, by their numbers in the first communicator of the family.
    """

    name: str
    ranks: tuple[int, ...]


def label_places(places: Iterable[Place]) -> dict[Place, str]:
    """What to call each place: its name, and its ranks where another one has that name, too."""
    known = set(places)
    num_named = Counter(place.name for place in known)
    return {
        place: place.name if num_named[place.name] == 1 else f"{place.name} of {name_ranks(place.ranks)}"
        for place in known
    }


@dataclass(kw_only=True)
class Measured:
    """What was measured of the communicators of one place: there may have been several, one after another.

    Attributes:
        place: of the communicators.
        totals: by kind of operation.
        lateness: by rank of the communicator.
        arrivals: at the latest operations of the communicator that is open.
    """

    place: Place
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
    """What the communicators of one place did while a recording ran: the latest of it, and how much had to go.

    Attributes:
        place: of the communicators.
        records: their operations.
        num_dropped: how many earlier operations are not there.
        marks: the latest of what :meth:`Telemetry.mark` was told, and when, in nanoseconds.
    """

    place: Place
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
        self._gone: dict[Place, Measured] = {}
        self._recorded: dict[Place, Recorded] = {}
        self._news: dict[Place, Recorded] | None = None
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
            found: dict[Place, Measured] = {}
            for gone in self._gone.values():
                found[gone.place] = replace(gone, totals=dict(gone.totals), lateness=dict(gone.lateness))
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
                for place in {member.place for member in self._members.values() if member.place.name == name}:
                    for recorded in self._recorded_at(place):
                        recorded.marks.append((now_ns, what))
                        if len(recorded.marks) > self._max_records:
                            recorded.marks.popleft()

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
        for recorded in self._recorded_at(member.place):
            recorded.records += map(OperationRecord._make, records)
            excess = max(0, len(recorded.records) - self._max_records)
            del recorded.records[:excess]
            recorded.num_dropped += num_dropped + excess

    def _recorded_at(self, place: Place) -> list[Recorded]:
        """Where is written down what the communicators of a place do."""
        kept = [self._recorded] if self._news is None else [self._recorded, self._news]
        return [places.setdefault(place, Recorded(place=place)) for places in kept]


class _Member:
    """One communicator, whose monitor counts on where the reports begin anew."""

    def __init__(self, communicator: Watched) -> None:
        self.place = Place(communicator.name, communicator.world_ranks)
        self.monitor = communicator.monitor
        self._totals_before: dict[str, OperationTotals] = {}
        self._lateness_before: dict[int, Lateness] = {}
        self._since_ns = 0

    def tell(self, found: dict[Place, Measured]) -> None:
        measured = found.setdefault(self.place, Measured(place=self.place))
        totals = [self._since_reset(more) for more in map(OperationTotals._make, self.monitor.totals())]
        lateness = map(Lateness._make, self.monitor.lateness())
        measured.add(
            (more for more in totals if more.num_operations or more.num_failed),
            (
                late.minus(self._lateness_before.get(late.rank, Lateness(late.rank, 0, 0)))
                for late in lateness
            ),
        )
        arrivals = map(Arrival._make, self.monitor.arrivals())
        measured.arrivals = [arrival for arrival in arrivals if arrival.time_ns >= self._since_ns]

    def reset(self) -> None:
        self._totals_before = {more[0]: OperationTotals._make(more) for more in self.monitor.totals()}
        self._lateness_before = {late[0]: Lateness._make(late) for late in self.monitor.lateness()}
        self._since_ns = time.monotonic_ns()

    def _since_reset(self, totals: OperationTotals) -> OperationTotals:
        before = self._totals_before.get(totals.kind)
        return totals if before is None else totals.minus(before)
