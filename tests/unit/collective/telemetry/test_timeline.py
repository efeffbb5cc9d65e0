from __future__ import annotations

from collections import deque

import pytest

from sparkdl.collective.telemetry.clock_offset import ClockOffset, SharedClock
from sparkdl.collective.telemetry.monitor import CommunicatorKey, OperationRecord, Recorded
from sparkdl.collective.telemetry.timeline import describe_rank, operation_events

WORLD = CommunicatorKey("world", (0, 1, 2, 3))


def record(**changes: object) -> OperationRecord:
    base = OperationRecord(
        sequence=5,
        kind="allreduce",
        name="weights",
        bytes=400,
        dtype="float32",
        is_ok=True,
        queued_ns=1_000,
        begun_ns=2_000,
        arrived_ns=2_500,
        ready_ns=4_500,
        done_ns=9_000,
        last=3,
    )
    return base._replace(**changes)


def events_of(*records: OperationRecord, num_dropped: int = 0) -> list[dict[str, object]]:
    recorded = [Recorded(key=WORLD, records=list(records), num_dropped=num_dropped)]
    return operation_events(2, recorded, lambda time_ns: time_ns / 1000)


def test_phases_of_an_operation_are_inside_its_slice() -> None:
    begin, end, whole, wait, transfer = events_of(record())
    assert [begin["ph"], end["ph"], whole["ph"], wait["ph"], transfer["ph"]] == ["b", "e", "X", "X", "X"]
    assert (begin["ts"], end["ts"]) == (1.0, 2.0)
    assert begin["id2"] == end["id2"] == {"local": "1/5"}
    assert (whole["ts"], whole["dur"], whole["name"]) == (2.0, 7.0, "allreduce weights")
    assert (wait["ts"], wait["dur"], wait["name"]) == (2.5, 2.0, "wait for rank 3")
    assert (transfer["ts"], transfer["dur"]) == (4.5, 4.5)
    assert [event["cat"] for event in (begin, whole, wait, transfer)] == [
        "QUEUE",
        "ALLREDUCE",
        "NEGOTIATE_ALLREDUCE",
        "TRANSFER_ALLREDUCE",
    ]
    assert whole["args"] == {"number": 5, "name": "weights", "bytes": 400, "dtype": "float32"}
    assert {(event["pid"], event["tid"]) for event in (begin, end, whole, wait, transfer)} == {(2, 1)}


def test_operation_that_waits_for_no_rank_is_all_transfer() -> None:
    whole, wait, transfer = events_of(record(queued_ns=0, arrived_ns=0, ready_ns=0, last=-1))
    assert (transfer["ts"], transfer["dur"]) == (whole["ts"], whole["dur"])
    assert (wait["name"], wait["cat"], wait["dur"]) == ("no wait", "NEGOTIATE_ALLREDUCE", 0)


def test_marks_are_in_the_thread_of_their_communicator() -> None:
    key = Recorded(key=WORLD, marks=deque([(4_000, "CYCLE_START")]))
    mark = {"ph": "i", "name": "CYCLE_START", "ts": 4.0, "s": "t", "pid": 2, "tid": 1}
    assert operation_events(2, [key], lambda time_ns: time_ns / 1000) == [mark]


def test_rank_that_is_not_known_is_not_named() -> None:
    assert "wait for other ranks" in [event["name"] for event in events_of(record(last=-1))]


def test_failed_operation_is_marked_as_failed() -> None:
    assert events_of(record(is_ok=False))[2]["args"]["failed"] is True  # type: ignore[index]


def test_dropped_operations_are_noted_where_they_are_missing() -> None:
    note = events_of(record(), num_dropped=7)[0]
    assert (note["ph"], note["ts"], note["name"]) == ("i", 2.0, "7 earlier operations were dropped")


def test_process_and_threads_have_names() -> None:
    names = describe_rank(
        2, "rank 2 on host", [Recorded(key=WORLD), Recorded(key=CommunicatorKey("world/pair", (0, 1)))]
    )
    named = {(event["name"], event["tid"]): event["args"] for event in names}
    assert named["process_name", 0] == {"name": "rank 2 on host"}
    assert named["thread_name", 2] == {"name": "world/pair"}
    assert {event["pid"] for event in names} == {2}


@pytest.mark.parametrize(("time_ns", "shared_ns"), [(1_000, 1_500), (2_000, 2_510), (1_500, 2_005)])
def test_clocks_drift_apart_steadily(time_ns: int, shared_ns: int) -> None:
    clock = SharedClock(
        first=ClockOffset(at_ns=1_000, offset_ns=500, error_ns=3),
        last=ClockOffset(at_ns=2_000, offset_ns=510, error_ns=7),
    )
    assert clock.to_shared(time_ns) == shared_ns
    assert clock.error_ns == 7


def test_clock_that_was_measured_once_does_not_drift() -> None:
    offset = ClockOffset(at_ns=1_000, offset_ns=500, error_ns=3)
    assert SharedClock(first=offset, last=offset).to_shared(10**12) == 10**12 + 500
