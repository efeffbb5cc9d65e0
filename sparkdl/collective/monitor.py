"""What can be told of a communicator's operations, whatever carries its data.

The native core has such a monitor of its own; transports in Python use
:class:`~sparkdl.collective.operation_monitor.OperationMonitor`. Times are in nanoseconds, points in time those of
``time.monotonic_ns()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub
from typing import NamedTuple, Protocol


class OperationTotals(NamedTuple):
    """The operations of one kind that ended well, but for ``num_failed``."""

    kind: str
    num_operations: int
    num_failed: int
    bytes: int
    """Of the whole buffer, the blocks of all ranks together where there are blocks, as nccl-tests counts."""
    busy_ns: int
    """From the beginning of each operation to its end."""
    waiting_ns: int
    """Of that, for other ranks to join."""
    queued_ns: int
    """Before the beginning, for earlier operations to end."""
    exposed_ns: int
    """Of ``busy_ns``, while a thread of the caller was blocked in an operation or in a handle's wait."""

    def plus(self, other: OperationTotals) -> OperationTotals:
        """The operations of both."""
        return OperationTotals(self.kind, *map(add, self[1:], other[1:]))

    def minus(self, other: OperationTotals) -> OperationTotals:
        """The operations that came after ``other``."""
        return OperationTotals(self.kind, *map(sub, self[1:], other[1:]))


class Lateness(NamedTuple):
    """How often one rank was the last that this rank waited for, and for how long in all."""

    rank: int
    num_operations: int
    waited_ns: int

    def plus(self, other: Lateness) -> Lateness:
        """The operations of both."""
        return Lateness(self.rank, *map(add, self[1:], other[1:]))

    def minus(self, other: Lateness) -> Lateness:
        """The operations that came after ``other``."""
        return Lateness(self.rank, *map(sub, self[1:], other[1:]))


class Arrival(NamedTuple):
    """When this rank came to one operation, by the operation's number."""

    sequence: int
    time_ns: int


class OperationRecord(NamedTuple):
    """One operation, as it was; a time that was not taken is 0."""

    sequence: int
    kind: str
    name: str
    bytes: int
    dtype: str
    is_ok: bool
    queued_ns: int
    begun_ns: int
    arrived_ns: int
    """When it had to wait for others; 0 if it did not."""
    ready_ns: int
    """When all ranks were there."""
    done_ns: int
    last: int
    """The rank that came last; -1 if nobody was waited for, or that is not known."""


class Monitor(Protocol):
    """Tells of operations; may be asked at any time, by any thread, and when the communicator is closed.

    What comes as a tuple has the fields of the class that is named.
    """

    def totals(self) -> Sequence[tuple[str, int, int, int, int, int, int, int]]:
        """:class:`OperationTotals` of every kind that there was."""

    def lateness(self) -> Sequence[tuple[int, int, int]]:
        """:class:`Lateness` of the ranks that were waited for, where the transport knows them."""

    def arrivals(self) -> Sequence[tuple[int, int]]:
        """:class:`Arrival` at each of the latest operations, where the transport does not know who came last."""

    def start_recording(self, max_records: int) -> None:
        """Write operations down from now on, the latest ``max_records`` until they are taken."""

    def stop_recording(self) -> None:
        """Write no more down."""

    def take_records(
        self,
    ) -> tuple[Sequence[tuple[int, str, str, int, str, bool, int, int, int, int, int, int]], int]:
        """The :class:`OperationRecord` of what was written down, and how many earlier ones had to go."""
