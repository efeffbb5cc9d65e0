"""What can be told of messages, beside a communicator's operations. Runs on ranks."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from sparkdl.collective.monitor import Arrival, OperationRecord
from sparkdl.collective.operation_monitor import OperationMonitor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective.monitor import Monitor


class MessageMonitor(OperationMonitor):
    """Counts and records messages, many of which may be on their way at once."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()

    def begin(self, kind: str, *, tag: int, num_bytes: int, dtype: str) -> MessageTiming:
        """Time a message from now on.

        Args:
            kind: ``"send"`` or ``"recv"``.
            tag: the message's.
            num_bytes: its size.
            dtype: of its elements.
        """
        return MessageTiming(self, kind, f"tag {tag}", num_bytes, dtype)

    def arrivals(self) -> Sequence[Arrival]:
        """Nothing: ranks do not come to the same messages."""
        return []

    def exposed_ns(self, now_ns: int) -> int:
        """For how long some thread has waited for messages until now."""
        return self._blocked_until(now_ns)

    def take(self, record: OperationRecord, exposed_ns: int) -> None:
        """Count a message that has ended; its number is given here."""
        self._note(record._replace(sequence=next(self._numbers)), exposed_ns)


class MessageTiming:
    """The edges of a message on its way."""

    def __init__(self, monitor: MessageMonitor, kind: str, name: str, num_bytes: int, dtype: str) -> None:
        self._monitor = monitor
        self._kind, self._name, self._num_bytes, self._dtype = kind, name, num_bytes, dtype
        self._begun_ns = time.monotonic_ns()
        self._blocked_ns = monitor.exposed_ns(self._begun_ns)
        self._ready_ns = 0

    @property
    def is_ready(self) -> bool:
        """Whether both ends are there."""
        return self._ready_ns > 0

    def both_here(self) -> None:
        """Say that the other end is there."""
        self._ready_ns = time.monotonic_ns()

    def end(self, *, is_ok: bool) -> None:
        """Say that the message has ended."""
        done_ns = time.monotonic_ns()
        record = OperationRecord(
            sequence=0,
            kind=self._kind,
            name=self._name,
            bytes=self._num_bytes,
            dtype=self._dtype,
            is_ok=is_ok,
            queued_ns=0,
            begun_ns=self._begun_ns,
            arrived_ns=self._begun_ns if self._ready_ns else 0,
            ready_ns=self._ready_ns,
            done_ns=done_ns,
            last=-1,
        )
        exposed_ns = self._monitor.exposed_ns(done_ns) - self._blocked_ns
        self._monitor.take(record, min(exposed_ns, done_ns - self._begun_ns))


class BothMonitors:
    """The operations of a communicator and its messages as one :class:`~sparkdl.collective.monitor.Monitor`."""

    def __init__(self, operations: Monitor, messages: MessageMonitor) -> None:
        self._operations, self._messages = operations, messages

    def totals(self) -> Sequence[tuple[str, int, int, int, int, int, int, int]]:
        """See the contract."""
        return [*self._operations.totals(), *self._messages.totals()]

    def lateness(self) -> Sequence[tuple[int, int, int]]:
        """See the contract; of operations alone."""
        return self._operations.lateness()

    def arrivals(self) -> Sequence[tuple[int, int]]:
        """See the contract; at operations alone."""
        return self._operations.arrivals()

    def start_recording(self, max_records: int) -> None:
        """See the contract."""
        self._operations.start_recording(max_records)
        self._messages.start_recording(max_records)

    def stop_recording(self) -> None:
        """See the contract."""
        self._operations.stop_recording()
        self._messages.stop_recording()

    def take_records(
        self,
    ) -> tuple[Sequence[tuple[int, str, str, int, str, bool, int, int, int, int, int, int]], int]:
        """See the contract."""
        records, num_dropped = self._operations.take_records()
        messages, num_dropped_messages = self._messages.take_records()
        if not messages:
            return records, num_dropped
        merged = sorted([*map(OperationRecord._make, records), *messages], key=lambda record: record.begun_ns)
        return merged, num_dropped + num_dropped_messages
