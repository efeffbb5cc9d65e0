"""The measurements of a communicator's operations, and the monitor of transports in Python.

The native core has a monitor of its own; transports in Python use
:class:`~sparkdl.collective.telemetry.monitor.OperationMonitor`. Times are in nanoseconds; points in time are those of
``time.monotonic_ns()``. The monitors of a communicator and of its process sets are measured together. Nothing here
communicates.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import add, sub
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sparkdl.collective.communicator import Communicator


class OperationTotals(NamedTuple):
    """Totals of the operations of one kind that succeeded; ``num_failed`` counts the failed ones."""

    kind: str
    num_operations: int
    num_failed: int
    bytes: int
    """Size of the whole buffers; if every rank has a block, of the blocks of all ranks, as nccl-tests counts."""
    busy_ns: int
    """Time from the beginning of each operation to its end."""
    waiting_ns: int
    """Part of ``busy_ns`` spent waiting for other ranks to join."""
    queued_ns: int
    """Time before the beginning, spent waiting for earlier operations to end."""
    exposed_ns: int
    """Part of ``busy_ns`` in which a thread of the caller was blocked in an operation or in a handle's wait."""


class Lateness(NamedTuple):
    """Number of operations in which one rank was the last that this rank waited for, and the total waiting time."""

    rank: int
    num_operations: int
    waited_ns: int


Counts = TypeVar("Counts", OperationTotals, Lateness)


def combine(counts: Counts, other: Counts, operator: Callable[[int, int], int]) -> Counts:
    """Apply an operator to the counts of two tuples, whose first fields are the same."""
    return type(counts)(counts[0], *map(operator, counts[1:], other[1:]))


class Arrival(NamedTuple):
    """Number of one operation, and the time at which this rank joined it."""

    sequence: int
    time_ns: int


class OperationRecord(NamedTuple):
    """The record of one operation; a time that was not measured is 0."""

    sequence: int
    kind: str
    name: str
    bytes: int
    dtype: str
    is_ok: bool = False
    queued_ns: int = 0
    begun_ns: int = 0
    arrived_ns: int = 0
    """Time at which the rank began to wait for other ranks; 0 if it did not wait."""
    ready_ns: int = 0
    """Time at which all ranks had joined."""
    done_ns: int = 0
    last: int = -1
    """Rank that joined last; -1 if this rank did not wait, or if that rank is not known."""


_NUM_ARRIVALS = 1024


class OperationMonitor:
    """Records operations as ``_native.Monitor`` does for the native core, for transports in Python.

    Its methods may be called at any time, by any thread, also after the communicator was closed.

    A transport runs each operation inside :meth:`operation`, one at a time, notes when all ranks have joined, and lets
    its callers wait for queued operations inside :meth:`blocked`. Many messages may be under way at once: they
    have a monitor of their own and are timed by :meth:`begin`.

    Args:
        is_collective: whether all ranks join every operation, so that their arrivals can be compared.
    """

    def __init__(self, *, is_collective: bool = True) -> None:
        self._lock = threading.Lock()
        self._totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._arrivals: deque[Arrival] = deque(maxlen=_NUM_ARRIVALS if is_collective else 0)
        self._records: deque[OperationRecord] = deque()
        self._is_recording = False
        self._max_records = 0
        self._num_dropped = 0
        self._num_blocked = 0
        self._blocked_since_ns = 0
        self._blocked_ns = 0
        self._counted_ns = 0
        self._num_ended = 0

    @contextmanager
    def operation(
        self, kind: str, *, name: str = "", num_bytes: int = 0, dtype: str = "", queued_ns: int = 0
    ) -> Iterator[OperationTiming]:
        """Time one operation from its beginning to its end; an exception counts it as failed.

        Args:
            kind: name of the communicator's method, such as ``"allreduce"``.
            name: the caller's name of the operation.
            num_bytes: see :attr:`OperationTotals.bytes`.
            dtype: dtype of the elements.
            queued_ns: time at which the operation was queued for the thread that runs it; 0 if the caller's thread
                runs it at once.
        """
        timing = self.begin(
            kind, name=name, num_bytes=num_bytes, dtype=dtype, queued_ns=queued_ns, is_blocking=not queued_ns
        )
        is_ok = False
        try:
            yield timing
            is_ok = True
        finally:
            timing.end(is_ok=is_ok)

    def begin(
        self, kind: str, *, name: str, num_bytes: int, dtype: str, queued_ns: int = 0, is_blocking: bool
    ) -> OperationTiming:
        """Begin to time an operation or a message; the arguments are those of :meth:`operation`.

        Args:
            kind: see :meth:`operation`; ``"send"`` or ``"recv"`` for a message.
            name: see :meth:`operation`.
            num_bytes: see :meth:`operation`.
            dtype: see :meth:`operation`.
            queued_ns: see :meth:`operation`.
            is_blocking: whether the caller is blocked until the end, also outside :meth:`blocked`.
        """
        now_ns = time.monotonic_ns()
        record = OperationRecord(0, kind, name, num_bytes, dtype, queued_ns=queued_ns, begun_ns=now_ns)
        return OperationTiming(self, record, None if is_blocking else self.blocked_until(now_ns))

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time inside the context as time in which the caller was blocked."""
        with self._lock:
            self._num_blocked += 1
            if self._num_blocked == 1:
                self._blocked_since_ns = time.monotonic_ns()
        try:
            yield
        finally:
            with self._lock:
                self._num_blocked -= 1
                if self._num_blocked == 0:
                    self._blocked_ns += time.monotonic_ns() - self._blocked_since_ns

    def totals(self) -> Sequence[OperationTotals]:
        """Return the totals of every kind of operation that was called."""
        with self._lock:
            return [
                OperationTotals(kind, *(counter[field] for field in OperationTotals._fields[1:]))
                for kind, counter in self._totals.items()
            ]

    def lateness(self) -> Sequence[Lateness]:
        """Empty: only the :meth:`arrivals` of all ranks together show which rank came last."""
        return []

    def arrivals(self) -> Sequence[Arrival]:
        """Return the arrivals at the latest operations."""
        with self._lock:
            return list(self._arrivals)

    def start_recording(self, max_records: int) -> None:
        """Begin to record operations; the latest ``max_records`` are kept until they are taken."""
        with self._lock:
            self._records, self._num_dropped, self._max_records = deque(), 0, max_records
            self._is_recording = True

    def stop_recording(self) -> None:
        """Stop recording operations."""
        with self._lock:
            self._is_recording = False

    def take_records(self) -> tuple[Sequence[OperationRecord], int]:
        """Remove and return the records of operations, and the number of dropped ones."""
        with self._lock:
            taken, self._records = self._records, deque()
            num_dropped, self._num_dropped = self._num_dropped, 0
            return list(taken), num_dropped

    def blocked_until(self, now_ns: int) -> int:
        """Return for how long some thread of the caller has been blocked, up to ``now_ns``."""
        with self._lock:
            running_ns = max(0, now_ns - self._blocked_since_ns) if self._num_blocked else 0
            return self._blocked_ns + running_ns

    def count_blocked(self, since_ns: int, now_ns: int) -> int:
        """Return for how long the caller has been blocked since a value of :meth:`blocked_until`, and count it.

        Of several messages that were under way while the caller was blocked, the first that ends counts the time, so
        that all of them together are not exposed for longer than the caller was blocked.
        """
        blocked_ns = self.blocked_until(now_ns)
        with self._lock:
            exposed_ns = max(0, blocked_ns - max(since_ns, self._counted_ns))
            self._counted_ns = max(self._counted_ns, blocked_ns)
        return exposed_ns

    def add(self, record: OperationRecord, exposed_ns: int) -> None:
        """Count an operation that has ended, and give its record a number."""
        with self._lock:
            counter = self._totals[record.kind]
            if record.is_ok:
                counter["num_operations"] += 1
                counter["bytes"] += record.bytes
                counter["busy_ns"] += record.done_ns - record.begun_ns
                counter["waiting_ns"] += record.ready_ns - record.arrived_ns
                counter["queued_ns"] += record.begun_ns - record.queued_ns if record.queued_ns else 0
                counter["exposed_ns"] += exposed_ns
            else:
                counter["num_failed"] += 1
            self._arrivals.append(Arrival(self._num_ended, record.begun_ns))
            self._num_ended += 1
            if not self._is_recording:
                return
            self._records.append(record._replace(sequence=self._num_ended - 1))
            if len(self._records) > self._max_records:
                self._records.popleft()
                self._num_dropped += 1


class OperationTiming:
    """Times of one operation or message under way.

    Attributes:
        ready_ns: time at which all ranks, or both ends of a message, had joined; 0 before that.
    """

    def __init__(
        self, monitor: OperationMonitor, record: OperationRecord, blocked_before_ns: int | None
    ) -> None:
        self._monitor, self._record, self._blocked_before_ns = monitor, record, blocked_before_ns
        self.ready_ns = 0

    def all_here(self) -> None:
        """Note that all ranks, or both ends of a message, have joined."""
        self.ready_ns = time.monotonic_ns()

    def end(self, *, is_ok: bool) -> None:
        """Note that the operation has ended, and count it."""
        begun_ns, done_ns = self._record.begun_ns, time.monotonic_ns()
        exposed_ns = done_ns - begun_ns
        if self._blocked_before_ns is not None:
            exposed_ns = min(exposed_ns, self._monitor.count_blocked(self._blocked_before_ns, done_ns))
        record = self._record._replace(
            is_ok=is_ok,
            arrived_ns=begun_ns if self.ready_ns else 0,
            ready_ns=self.ready_ns,
            done_ns=done_ns,
        )
        self._monitor.add(record, exposed_ns)


class CommunicatorKey(NamedTuple):
    """The identity of communicators in a family: process sets of different ranks may have the same name.

    Attributes:
        name: name of the communicator.
        ranks: world rank of each of its ranks, the number in the first communicator of the family.
    """

    name: str
    ranks: tuple[int, ...]


def label_communicators(keys: Iterable[CommunicatorKey]) -> dict[CommunicatorKey, str]:
    """Return a label for each key: the name, with the ranks if another key has the same name."""
    known = set(keys)
    num_named = Counter(key.name for key in known)
    return {
        key: key.name if num_named[key.name] == 1 else f"{key.name} of {name_ranks(key.ranks)}"
        for key in known
    }


@dataclass(kw_only=True)
class CommunicatorMeasurements:
    """The measurements of the communicators with one key; there may have been several, one after another.

    Attributes:
        key: key of the communicators.
        totals: totals of the operations, by kind.
        lateness: lateness of the ranks, by rank of the communicator.
        arrivals: arrivals of this rank at the latest operations of the open communicator.
    """

    key: CommunicatorKey
    totals: dict[str, OperationTotals] = field(default_factory=dict)
    lateness: dict[int, Lateness] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)

    def add(self, totals: Iterable[OperationTotals], lateness: Iterable[Lateness]) -> None:
        """Add the counts of a monitor."""
        for more in totals:
            known = self.totals.get(more.kind)
            self.totals[more.kind] = more if known is None else combine(known, more, add)
        for late in lateness:
            known_late = self.lateness.get(late.rank)
            self.lateness[late.rank] = late if known_late is None else combine(known_late, late, add)


@dataclass(kw_only=True)
class Recorded:
    """The latest operations of the communicators with one key while a recording ran.

    Attributes:
        key: key of the communicators.
        records: records of their operations.
        num_dropped: number of earlier operations that were dropped.
        marks: the latest marks of :meth:`Telemetry.mark`: time in nanoseconds, and text.
    """

    key: CommunicatorKey
    records: list[OperationRecord] = field(default_factory=list)
    num_dropped: int = 0
    marks: deque[tuple[int, str]] = field(default_factory=deque)


class Telemetry:
    """The communicators of a family, and the measurements of those that no longer exist.

    All methods may be called from several threads at once.

    Attributes:
        is_recording: whether operations are being recorded.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may ask for a report at any line
        self._members: dict[int, _Member] = {}
        # The garbage collector may drop a communicator at any line, also where this thread has a lock of a monitor: it
        # only notes the number, without a lock. The next method of the family does the rest.
        self._dropped: deque[int] = deque()
        self._num_members = 0
        self._gone: dict[CommunicatorKey, CommunicatorMeasurements] = {}
        self._recorded: dict[CommunicatorKey, Recorded] = {}
        self._news: dict[CommunicatorKey, Recorded] | None = None
        self._max_records = 0
        self.is_recording = False
        self._since = time.monotonic()

    def watch(self, communicator: Communicator) -> None:
        """Add a communicator to the family."""
        with self._lock:
            self._fold_dropped()
            self._num_members += 1
            number = self._num_members
            member = _Member(communicator)
            self._members[number] = member
            if self.is_recording:
                member.start_recording(self._max_records)
        weakref.finalize(communicator, self._dropped.append, number).atexit = False

    def measure(self, *, reset: bool = False) -> tuple[list[CommunicatorMeasurements], float]:
        """Return the measurements of every communicator, and the seconds that they cover.

        Args:
            reset: whether to set the counts to zero afterwards.
        """
        with self._lock:
            self._fold_dropped()
            measurements: dict[CommunicatorKey, CommunicatorMeasurements] = {}
            for gone in self._gone.values():
                measurements[gone.key] = replace(gone, totals=dict(gone.totals), lateness=dict(gone.lateness))
            for member in list(self._members.values()):
                member.add_to(measurements)
                if reset:
                    member.reset()
            now = time.monotonic()
            seconds = now - self._since
            if reset:
                self._gone, self._since = {}, now
            return list(measurements.values()), seconds

    @property
    def since(self) -> float:
        """Time of the last reset of the counts, of ``time.monotonic()``; at first, when the family was opened."""
        with self._lock:
            return self._since

    def start_recording(self, max_records: int, *, has_news: bool = False) -> None:
        """Begin to record the operations of every communicator, including those added later.

        Args:
            max_records: number of records that are kept for each communicator, the latest ones.
            has_news: whether :meth:`take_news` will be called.
        """
        with self._lock:
            self._fold_dropped()
            self.is_recording, self._max_records, self._recorded = True, max_records, {}
            self._news = {} if has_news else None
            for member in list(self._members.values()):
                member.start_recording(max_records)

    def mark(self, name: str, what: str) -> None:
        """Add a mark to the recording, if one runs.

        Args:
            name: name of the communicators to whose operations the mark belongs.
            what: text of the mark.
        """
        with self._lock:
            if self.is_recording:
                now_ns = time.monotonic_ns()
                for key in {member.key for member in self._members.values() if member.key.name == name}:
                    for recorded in self._recorded_at(key):
                        recorded.marks.append((now_ns, what))
                        if len(recorded.marks) > self._max_records:
                            recorded.marks.popleft()

    def take_news(self) -> list[Recorded]:
        """Return the records since the last call; :meth:`stop_recording` returns them again."""
        with self._lock:
            self._fold_dropped()
            if self.is_recording:
                for member in list(self._members.values()):
                    self._collect(member)
            news, self._news = self._news, {}
            return list((news or {}).values())

    def stop_recording(self) -> list[Recorded]:
        """End the recording; return the records of every communicator."""
        with self._lock:
            self._fold_dropped()
            self.is_recording = False
            for member in list(self._members.values()):
                for monitor in member.monitors:
                    monitor.stop_recording()
                self._collect(member)
            recorded, self._recorded, self._news = self._recorded, {}, None
            return list(recorded.values())

    def _fold_dropped(self) -> None:
        """Keep the measurements of communicators that no longer exist, and let go of their monitors."""
        while self._dropped:
            member = self._members.pop(self._dropped.popleft())
            member.add_to(self._gone)
            if self.is_recording:
                self._collect(member)

    def _collect(self, member: _Member) -> None:
        taken = [monitor.take_records() for monitor in member.monitors]
        records = [OperationRecord._make(record) for part, _ in taken for record in part]
        records.sort(key=lambda record: record.begun_ns)
        num_dropped = sum(number for _, number in taken)
        for recorded in self._recorded_at(member.key):
            recorded.records += records
            excess = max(0, len(recorded.records) - self._max_records)
            del recorded.records[:excess]
            recorded.num_dropped += num_dropped + excess

    def _recorded_at(self, key: CommunicatorKey) -> list[Recorded]:
        """Return the records of the communicators with one key: all of them, and those for :meth:`take_news`."""
        kept = [self._recorded] if self._news is None else [self._recorded, self._news]
        return [keys.setdefault(key, Recorded(key=key)) for keys in kept]


class _Member:
    """One communicator, and the counts of its monitors at the last reset, which reports subtract."""

    def __init__(self, communicator: Communicator) -> None:
        self.key = CommunicatorKey(communicator.name, communicator.world_ranks)
        self.monitors = communicator.monitors
        self._totals_before: dict[str, OperationTotals] = {}
        self._lateness_before: dict[int, Lateness] = {}
        self._since_ns = 0

    def start_recording(self, max_records: int) -> None:
        for monitor in self.monitors:
            monitor.start_recording(max_records)

    def add_to(self, measurements: dict[CommunicatorKey, CommunicatorMeasurements]) -> None:
        measured = measurements.setdefault(self.key, CommunicatorMeasurements(key=self.key))
        totals, lateness = self._totals(), self._lateness()
        since_reset = [
            combine(counts, self._totals_before[kind], sub) if kind in self._totals_before else counts
            for kind, counts in totals.items()
        ]
        measured.add(
            (counts for counts in since_reset if counts.num_operations or counts.num_failed),
            (
                combine(late, self._lateness_before.get(rank, Lateness(rank, 0, 0)), sub)
                for rank, late in lateness.items()
            ),
        )
        arrivals = [Arrival._make(arrival) for monitor in self.monitors for arrival in monitor.arrivals()]
        measured.arrivals = [arrival for arrival in arrivals if arrival.time_ns >= self._since_ns]

    def reset(self) -> None:
        self._totals_before, self._lateness_before = self._totals(), self._lateness()
        self._since_ns = time.monotonic_ns()

    def _totals(self) -> dict[str, OperationTotals]:
        return {
            counts[0]: OperationTotals._make(counts)
            for monitor in self.monitors
            for counts in monitor.totals()
        }

    def _lateness(self) -> dict[int, Lateness]:
        return {late[0]: Lateness._make(late) for monitor in self.monitors for late in monitor.lateness()}
