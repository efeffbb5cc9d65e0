from __future__ import annotations

import threading
import time
from operator import add, sub

import pytest

from sparkdl.collective.telemetry.monitor import Lateness, OperationMonitor, OperationTotals, combine


def totals_of(monitor: OperationMonitor) -> dict[str, OperationTotals]:
    return {totals.kind: totals for totals in monitor.totals()}


def test_time_is_divided_into_waiting_and_transfer() -> None:
    monitor = OperationMonitor()
    with monitor.operation("allreduce", num_bytes=40) as timing:
        threading.Event().wait(0.02)
        timing.all_here()
        threading.Event().wait(0.01)
    (totals,) = monitor.totals()
    assert (totals.kind, totals.num_operations, totals.bytes) == ("allreduce", 1, 40)
    assert totals.waiting_ns >= 20e6
    assert totals.busy_ns >= totals.waiting_ns + 10e6
    assert totals.exposed_ns == totals.busy_ns
    assert totals.queued_ns == 0


def test_queued_operation_is_exposed_while_a_thread_is_blocked() -> None:
    monitor = OperationMonitor()
    with monitor.operation("barrier", queued_ns=1):
        threading.Event().wait(0.02)
    assert totals_of(monitor)["barrier"].exposed_ns == 0
    with monitor.operation("broadcast", queued_ns=1):
        threading.Event().wait(0.02)
        # Two concurrent waits take no longer than one.
        with monitor.blocked(), monitor.blocked():
            threading.Event().wait(0.02)
    totals = totals_of(monitor)["broadcast"]
    assert 20e6 <= totals.exposed_ns <= totals.busy_ns - 20e6


def test_messages_that_the_caller_waits_for_at_once_are_exposed_for_its_wait_together() -> None:
    monitor = OperationMonitor(is_collective=False)
    began_ns = time.monotonic_ns()
    messages = [
        monitor.begin(kind, name="", num_bytes=8, dtype="uint8", is_blocking=False)
        for kind in ("send", "recv", "recv")
    ]
    with monitor.blocked():
        threading.Event().wait(0.02)
        for message in messages:
            message.end(is_ok=True)
    exposed_ns = sum(totals.exposed_ns for totals in monitor.totals())
    assert 20e6 <= exposed_ns <= time.monotonic_ns() - began_ns


def test_failed_operation_is_counted_only_as_failed() -> None:
    monitor = OperationMonitor()
    monitor.start_recording(10)
    with pytest.raises(ValueError, match="bad"), monitor.operation("reduce", num_bytes=8):
        raise ValueError("bad")
    assert totals_of(monitor)["reduce"] == OperationTotals("reduce", 0, 1, 0, 0, 0, 0, 0)
    (record,), num_dropped = monitor.take_records()
    assert not record.is_ok
    assert num_dropped == 0


def test_latest_records_are_kept_until_they_are_taken() -> None:
    monitor = OperationMonitor()
    for name in "before":
        with monitor.operation("barrier", name=name):
            pass
    monitor.start_recording(3)
    for name in "abcde":
        with monitor.operation("barrier", name=name):
            pass
    records, num_dropped = monitor.take_records()
    assert [record.name for record in records] == ["c", "d", "e"]
    assert num_dropped == 2
    monitor.stop_recording()
    with monitor.operation("barrier"):
        pass
    assert monitor.take_records() == ([], 0)
    assert [sequence for sequence, _ in monitor.arrivals()] == list(range(12))


def test_totals_can_be_added_and_subtracted() -> None:
    some, more = OperationTotals("a", 1, 2, 3, 4, 5, 6, 7), OperationTotals("a", 10, 20, 30, 40, 50, 60, 70)
    total = combine(some, more, add)
    assert total == OperationTotals("a", 11, 22, 33, 44, 55, 66, 77)
    assert combine(total, more, sub) == some
    assert combine(combine(Lateness(3, 1, 2), Lateness(3, 5, 5), add), Lateness(3, 1, 2), sub) == Lateness(
        3, 5, 5
    )
