"""Timeline: the operations of all ranks over time, in one file.

Recorded operations become events of the Trace Event Format, which Perfetto and chrome://tracing open:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. In this format, a rank is a process,
and a communicator or process set is a thread. Each operation is a slice that contains two others: the wait for the
other ranks to join, and the transfer. The time in the queue is an asynchronous event, as queued operations overlap. The
categories are the names of Horovod's phases.

While a live timeline runs, rank 0 appends its own operations to the file, without communication. Until the end, the
file is in the JSON Array Format, which needs no closing bracket, so that it can be opened at any time, even if the job
was killed. At the end, a file with the operations of all ranks replaces it.

The ranks gather the timeline over a separate communicator. It does not interfere with the observed operations, and the
records of the other ranks can still be gathered after one of these operations has failed.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.byte_exchange import broadcast_bytes, gather_bytes
from sparkdl.collective.telemetry.clock_offset import SharedClock, measure_offset
from sparkdl.collective.telemetry.monitor import CommunicatorKey, Recorded, label_communicators
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, ParamError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.telemetry.monitor import OperationRecord, Telemetry

logger = logging.getLogger(__name__)


Event = dict[str, Any]

More = Callable[[Callable[[int], float]], list[Event]]
"""Returns further events of a rank; it gets a function that converts a time of the rank to microseconds of the file."""


def describe_rank(rank: int, label: str, recorded: Sequence[Recorded]) -> list[Event]:
    """Return the events that name a rank's process and its threads.

    Args:
        rank: number of the rank, used as the process id.
        label: name of the process.
        recorded: records of the communicators; each is a thread.
    """
    events = [
        _metadata("process_name", rank, 0, name=label),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
    ]
    labels = label_communicators(part.key for part in recorded)
    for thread, part in enumerate(recorded, start=1):
        events.append(_metadata("thread_name", rank, thread, name=labels[part.key]))
        events.append(_metadata("thread_sort_index", rank, thread, sort_index=thread))
    return events


def operation_events(
    rank: int, recorded: Sequence[Recorded], microseconds: Callable[[int], float]
) -> list[Event]:
    """Return the events of a rank's operations and marks, and a note on each thread with dropped operations.

    Args:
        rank: number of the rank, used as the process id.
        recorded: records of the communicators; each is a thread.
        microseconds: converts a time of this rank, in nanoseconds, to a time of the file, in microseconds.
    """
    events: list[Event] = []
    labels = label_communicators(part.key for part in recorded)
    for thread, part in enumerate(recorded, start=1):
        location = {"pid": rank, "tid": thread}
        if part.num_dropped and part.records:
            first = microseconds(part.records[0].begun_ns)
            name = f"{part.num_dropped} earlier operations were dropped"
            events.append({"ph": "i", "name": name, "ts": first, "s": "t", **location})
        for time_ns, what in part.marks:
            events.append({"ph": "i", "name": what, "ts": microseconds(time_ns), "s": "t", **location})
        for record in part.records:
            last = part.key.ranks[record.last] if record.last >= 0 else -1
            events += _events_of(record._replace(last=last), labels[part.key], location, microseconds)
    return events


def _metadata(kind: str, rank: int, thread: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "ts": 0, "args": arguments}


def _events_of(
    record: OperationRecord, communicator: str, location: Event, microseconds: Callable[[int], float]
) -> Iterator[Event]:
    begun, done = microseconds(record.begun_ns), microseconds(record.done_ns)
    category = record.kind.upper()
    if record.queued_ns:
        # Perfetto shows what has an id of its process there, and other asynchronous events apart from all ranks.
        key = {"cat": "QUEUE", "id2": {"local": f"{location['tid']}/{record.sequence}"}}
        name = f"queue of {communicator}"
        yield {"ph": "b", "name": name, "ts": microseconds(record.queued_ns), **key, **location}
        yield {"ph": "e", "name": name, "ts": begun, **key, **location}
    yield {
        "ph": "X",
        "name": f"{record.kind} {record.name}" if record.name else record.kind,
        "cat": category,
        "ts": begun,
        "dur": round(done - begun, 3),
        "args": _arguments(record),
        **location,
    }
    # Horovod's timelines have this phase on every rank, also on the one that came last.
    wait, arrived, transfer = "no wait", begun, begun
    if record.ready_ns:
        wait = f"wait for rank {record.last}" if record.last >= 0 else "wait for other ranks"
        arrived, transfer = microseconds(record.arrived_ns), microseconds(record.ready_ns)
    yield {
        "ph": "X",
        "name": wait,
        "cat": f"NEGOTIATE_{category}",
        "ts": arrived,
        "dur": round(transfer - arrived, 3),
        **location,
    }
    yield {
        "ph": "X",
        "name": "transfer",
        "cat": f"TRANSFER_{category}",
        "ts": transfer,
        "dur": round(done - transfer, 3),
        **location,
    }


def _arguments(record: OperationRecord) -> Event:
    arguments: Event = {"number": record.sequence, "name": record.name}
    if record.bytes:
        arguments |= {"bytes": record.bytes, "dtype": record.dtype}
    if not record.is_ok:
        arguments["failed"] = True
    return arguments


_PERIOD_S = 0.05

_encode = json.JSONEncoder(separators=(",", ":")).encode


class LiveTimeline:
    """Appends new records of a recording to a file periodically, until it is closed.

    Args:
        path: path of the file, which is emptied.
        telemetry: telemetry that records the operations.
        rank: number of this rank.
        begin_ns: time that is zero in the file.
    """

    def __init__(self, path: Path, telemetry: Telemetry, rank: int, begin_ns: int) -> None:
        self._path = path
        self._telemetry = telemetry
        self._rank, self._begin_ns = rank, begin_ns
        self._keys: list[CommunicatorKey] = []
        """Keys of the communicators so far, in the order of their threads."""
        path.write_text("[\n", encoding="utf-8")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"timeline {path}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop writing."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            try:
                self._write_news()
            except OSError as error:
                logger.warning("Cannot append to the live timeline %s: %s", self._path, error)
                return

    def _write_news(self) -> None:
        news = {part.key: part for part in self._telemetry.take_news()}
        new_keys = [key for key in news if key not in self._keys]
        self._keys += new_keys
        parts = [news.get(key, Recorded(key=key)) for key in self._keys]
        events = operation_events(self._rank, parts, lambda time_ns: max(0, time_ns - self._begin_ns) / 1000)
        if new_keys:
            label = f"rank {self._rank} on {socket.gethostname()}"
            events = describe_rank(self._rank, label, parts) + events
        if events:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{_encode(event)},\n" for event in events)


_REST_S = 5.0
"""How long rank 0 waits for the records of the other ranks after a rank was lost."""


class Timeline:
    """A running timeline. All ranks create it and stop it together.

    Args:
        duplicate: communicator of the same ranks for the timeline only; the timeline closes it.
        telemetry: telemetry of the observed communicators.
        path: path of the file, on rank 0's machine.
        max_events: number of operations that are kept for each communicator, the latest ones.
        is_live: whether rank 0 writes its own operations to the file while the timeline runs.

    Raises:
        ParamError: on every rank, if rank 0 cannot write the file.
    """

    def __init__(
        self, duplicate: Communicator, telemetry: Telemetry, path: Path, *, max_events: int, is_live: bool
    ) -> None:
        self._duplicate = duplicate
        self._telemetry = telemetry
        self._path = path
        self._world_ranks = duplicate.world_ranks
        problem = ""
        if duplicate.rank == 0:
            try:
                path.touch()
            except OSError as error:
                problem = str(error)
        self._raise_together(problem, None)
        self._first_offset = measure_offset(duplicate)
        # The file's time begins here, on rank 0's clock.
        begin = np.array([time.monotonic_ns(), time.time_ns() // 1000], np.int64)
        duplicate.broadcast(begin, root=0, name="beginning of the timeline")
        self._begin_ns, self._begin_epoch_us = map(int, begin)
        self._rendezvous = duplicate.rendezvous.view(f"{duplicate.name}/{self._begin_ns}")
        is_live = is_live and duplicate.rank == 0
        telemetry.start_recording(max_events, has_news=is_live)
        self._live = LiveTimeline(path, telemetry, self._world_ranks[0], self._begin_ns) if is_live else None

    def stop(self, *, timeout_s: float | None = None, more: More | None = None) -> None:
        """End the recording and write the file; collective.

        If ranks were lost, rank 0 writes the records of the others and logs a warning.

        Args:
            timeout_s: seconds for each step; the communicator's deadline when None.
            more: returns further events of this rank; None for none.

        Raises:
            ParamError: on every rank, if rank 0 cannot write the file.
        """
        if self._live is not None:
            self._live.close()
        recorded = self._telemetry.stop_recording()
        clock = SharedClock(first=self._first_offset, last=self._first_offset)
        try:
            clock = SharedClock(first=clock.first, last=measure_offset(self._duplicate, timeout_s=timeout_s))
            seen = self._pack(recorded, clock, more)
            gathered = gather_bytes(self._duplicate, seen, root=0, name="timeline", timeout_s=timeout_s)
            problem = self._write(gathered, missing={}) if gathered else ""
            self._raise_together(problem, timeout_s)
        except CommunicatorError as error:
            self._save_the_rest(self._pack(recorded, clock, more), error)
        finally:
            self._duplicate.close()

    def drop(self) -> None:
        """End the recording of this rank; nothing is written."""
        if self._live is not None:
            self._live.close()
        self._telemetry.stop_recording()
        self._duplicate.close()

    def _raise_together(self, problem: str, timeout_s: float | None) -> None:
        """Raise rank 0's problem on every rank."""
        text = broadcast_bytes(
            self._duplicate, problem.encode(), root=0, name="state of the timeline", timeout_s=timeout_s
        ).decode()
        if text:
            raise ParamError(f"the timeline cannot be written to {self._path}: {text}")

    def _pack(self, recorded: list[Recorded], clock: SharedClock, more: More | None) -> bytes:
        def microseconds(time_ns: int) -> float:
            # Operations that began before the timeline are shown from its beginning.
            return max(0, clock.to_shared(time_ns) - self._begin_ns) / 1000

        rank = self._world_ranks[self._duplicate.rank]
        labels = label_communicators(part.key for part in recorded)
        seen = {
            "events": describe_rank(rank, f"rank {rank} on {socket.gethostname()}", recorded)
            + operation_events(rank, recorded, microseconds)
            + ([] if more is None else more(microseconds)),
            "dropped": {labels[part.key]: part.num_dropped for part in recorded if part.num_dropped},
            "clock_error_us": clock.error_ns / 1000,
        }
        return zlib.compress(json.dumps(seen, separators=(",", ":")).encode(), level=1)

    def _save_the_rest(self, seen: bytes, error: CommunicatorError) -> None:
        """Gather the records of the remaining ranks through the rendezvous, which works without the lost ranks."""
        if self._duplicate.rank != 0:
            self._rendezvous.set(str(self._duplicate.rank), seen)
            return
        gathered, missing = [seen], {}
        deadline = Deadline(_REST_S)
        for rank in range(1, self._duplicate.world_size):
            try:
                gathered.append(self._rendezvous.get(str(rank), deadline.remaining_s()))
            except CommunicatorTimeoutError:
                missing[rank] = str(error)
        problem = self._write(gathered, missing)
        if problem:
            raise ParamError(f"the timeline cannot be written to {self._path}: {problem}")
        if missing:
            ranks = [self._world_ranks[rank] for rank in sorted(missing)]
            logger.warning("The timeline %s is without %s: %s", self._path, name_ranks(ranks), error)

    def _write(self, gathered: list[bytes], missing: dict[int, str]) -> str:
        """Write the file; return the error, or an empty string."""
        present = [rank for rank in range(self._duplicate.world_size) if rank not in missing]
        seen = {
            f"rank {self._world_ranks[rank]}": json.loads(zlib.decompress(part))
            for rank, part in zip(present, gathered, strict=True)
        }
        events = [event for part in seen.values() for event in part["events"]]
        dropped = {rank: part["dropped"] for rank, part in seen.items() if part["dropped"]}
        about = {
            "start_time_since_epoch_in_micros": self._begin_epoch_us,
            "clock_error_us": {rank: part["clock_error_us"] for rank, part in seen.items()},
            "dropped": dropped,
            "missing": {f"rank {self._world_ranks[rank]}": why for rank, why in missing.items()},
        }
        if dropped:
            logger.warning(
                "The timeline %s has the latest operations alone; dropped: %s", self._path, dropped
            )
        events.sort(key=lambda event: float(event["ts"]))
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            part.write_text(
                json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}),
                encoding="utf-8",
            )
            part.replace(self._path)
        except OSError as error:
            return str(error)
        return ""
