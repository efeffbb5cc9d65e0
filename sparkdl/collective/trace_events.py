"""Recorded operations as events of the Trace Event Format, which Perfetto and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A rank is a process of it,
a communicator or process set a thread. Each operation is a slice that holds two others, waiting for the other ranks to
join and the transfer; how long it was queued before is an asynchronous event, as queued operations overlap. The
categories are the names of Horovod's phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.collective.telemetry import label_places

if TYPE_CHECKING:
    from sparkdl.collective.monitor import OperationRecord
    from sparkdl.collective.telemetry import Recorded

Event = dict[str, Any]


def describe_rank(rank: int, label: str, recorded: Sequence[Recorded]) -> list[Event]:
    """The events that name a rank's process and its threads.

    Args:
        rank: the process.
        label: what it is called.
        recorded: a thread for each.
    """
    events = [
        _metadata("process_name", rank, 0, name=label),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
    ]
    labels = label_places(part.place for part in recorded)
    for thread, part in enumerate(recorded, start=1):
        events.append(_metadata("thread_name", rank, thread, name=labels[part.place]))
        events.append(_metadata("thread_sort_index", rank, thread, sort_index=thread))
    return events


def operation_events(
    rank: int, recorded: Sequence[Recorded], microseconds: Callable[[int], float]
) -> list[Event]:
    """The events of a rank's operations, the marks between them, and a word of each thread that had to drop some.

    Args:
        rank: the process.
        recorded: a thread for each.
        microseconds: from a time of this rank to one of the file.
    """
    events: list[Event] = []
    labels = label_places(part.place for part in recorded)
    for thread, part in enumerate(recorded, start=1):
        place = {"pid": rank, "tid": thread}
        if part.num_dropped and part.records:
            first = microseconds(part.records[0].begun_ns)
            name = f"{part.num_dropped} earlier operations were dropped"
            events.append({"ph": "i", "name": name, "ts": first, "s": "t", **place})
        for time_ns, what in part.marks:
            events.append({"ph": "i", "name": what, "ts": microseconds(time_ns), "s": "t", **place})
        for record in part.records:
            last = part.place.ranks[record.last] if record.last >= 0 else -1
            events += _events_of(record._replace(last=last), labels[part.place], place, microseconds)
    return events


def _metadata(kind: str, rank: int, thread: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "ts": 0, "args": arguments}


def _events_of(
    record: OperationRecord, communicator: str, place: Event, microseconds: Callable[[int], float]
) -> Iterator[Event]:
    begun, done = microseconds(record.begun_ns), microseconds(record.done_ns)
    category = record.kind.upper()
    if record.queued_ns:
        key = {"cat": "QUEUE", "id": f"{place['pid']}/{place['tid']}/{record.sequence}"}
        name = f"queue of {communicator}"
        yield {"ph": "b", "name": name, "ts": microseconds(record.queued_ns), **key, **place}
        yield {"ph": "e", "name": name, "ts": begun, **key, **place}
    yield {
        "ph": "X",
        "name": f"{record.kind} {record.name}" if record.name else record.kind,
        "cat": category,
        "ts": begun,
        "dur": _duration(begun, done),
        "args": _arguments(record),
        **place,
    }
    # Whoever looks for this phase, as Horovod's users do, finds it also on the rank that came last.
    wait, arrived, transfer = "waited for nobody", begun, begun
    if record.ready_ns:
        wait = f"wait for rank {record.last}" if record.last >= 0 else "wait for other ranks"
        arrived, transfer = microseconds(record.arrived_ns), microseconds(record.ready_ns)
    yield {
        "ph": "X",
        "name": wait,
        "cat": f"NEGOTIATE_{category}",
        "ts": arrived,
        "dur": _duration(arrived, transfer),
        **place,
    }
    yield {
        "ph": "X",
        "name": "transfer",
        "cat": f"TRANSFER_{category}",
        "ts": transfer,
        "dur": _duration(transfer, done),
        **place,
    }


def _duration(begin: float, end: float) -> float:
    return round(end - begin, 3)


def _arguments(record: OperationRecord) -> Event:
    arguments: Event = {"number": record.sequence, "name": record.name}
    if record.bytes:
        arguments |= {"bytes": record.bytes, "dtype": record.dtype}
    if not record.is_ok:
        arguments["failed"] = True
    return arguments
