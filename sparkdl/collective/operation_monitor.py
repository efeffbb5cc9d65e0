"""The monitor of transports that are written in Python."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.collective.monitor import Arrival, OperationRecord, OperationTotals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sparkdl.collective.monitor import Lateness

_NUM_ARRIVALS = 1024


class OperationMonitor:
    """Implements :class:`~sparkdl.collective.monitor.Monitor`.

    A transport runs each operation inside :meth:`operation`, one at a time, says when all ranks are there, and has
    its callers wait for queued operations inside :meth:`blocked`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._arrivals: deque[Arrival] = deque(maxlen=_NUM_ARRIVALS)
        self._records: deque[OperationRecord] = deque()
        self._is_recording = False
        self._max_records = 0
        self._num_dropped = 0
        self._num_blocked = 0
        self._blocked_since_ns = 0
        self._blocked_ns = 0
        self._next_sequence = 0

    @contextmanager
    def operation(
        self, kind: str, *, name: str = "", num_bytes: int = 0, dtype: str = "", queued_ns: int = 0
    ) -> Iterator[OperationTiming]:
        """Time one operation from its beginning to its end; an exception counts it as failed.

        Args:
            kind: the contract's method, as ``"allreduce"``.
            name: what the caller calls it.
            num_bytes: see :attr:`OperationTotals.bytes`.
            dtype: of the elements.
            queued_ns: when it was handed to the thread that runs it; 0 if the caller's thread runs it at once.
        """
        sequence = self._next_sequence
        self._next_sequence += 1
        timing = OperationTiming()
        blocked_ns = self._blocked_until(timing.begun_ns)
        is_ok = False
        try:
            yield timing
            is_ok = True
        finally:
            done_ns = time.monotonic_ns()
            exposed_ns = done_ns - timing.begun_ns
            if queued_ns:
                exposed_ns = min(exposed_ns, self._blocked_until(done_ns) - blocked_ns)
            record = OperationRecord(
                sequence=sequence,
                kind=kind,
                name=name,
                bytes=num_bytes,
                dtype=dtype,
                is_ok=is_ok,
                queued_ns=queued_ns,
                begun_ns=timing.begun_ns,
                arrived_ns=timing.begun_ns if timing.ready_ns else 0,
                ready_ns=timing.ready_ns,
                done_ns=done_ns,
                last=-1,
            )
            self._note(record, exposed_ns)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time inside as time in which the caller was blocked."""
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
        """See the contract."""
        with self._lock:
            return [
                OperationTotals(kind, *(counter[field] for field in OperationTotals._fields[1:]))
                for kind, counter in self._totals.items()
            ]

    def lateness(self) -> Sequence[Lateness]:
        """Nothing: only :meth:`arrivals` of all ranks show who came last."""
        return []

    def arrivals(self) -> Sequence[Arrival]:
        """See the contract."""
        with self._lock:
            return list(self._arrivals)

    def start_recording(self, max_records: int) -> None:
        """See the contract."""
        with self._lock:
            self._records, self._num_dropped, self._max_records = deque(), 0, max_records
            self._is_recording = True

    def stop_recording(self) -> None:
        """See the contract."""
        with self._lock:
            self._is_recording = False

    def take_records(self) -> tuple[Sequence[OperationRecord], int]:
        """See the contract."""
        with self._lock:
            taken, self._records = self._records, deque()
            num_dropped, self._num_dropped = self._num_dropped, 0
            return list(taken), num_dropped

    def _blocked_until(self, now_ns: int) -> int:
        with self._lock:
            running_ns = max(0, now_ns - self._blocked_since_ns) if self._num_blocked else 0
            return self._blocked_ns + running_ns

    def _note(self, record: OperationRecord, exposed_ns: int) -> None:
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
            self._arrivals.append(Arrival(record.sequence, record.begun_ns))
            if not self._is_recording:
                return
            self._records.append(record)
            if len(self._records) > self._max_records:
                self._records.popleft()
                self._num_dropped += 1


class OperationTiming:
    """The edges of an operation under way."""

    def __init__(self) -> None:
        self.begun_ns = time.monotonic_ns()
        self.ready_ns = 0

    def all_here(self) -> None:
        """Say that all ranks are there."""
        self.ready_ns = time.monotonic_ns()
