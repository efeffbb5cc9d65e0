"""The timeline: what every rank communicated when, in one file for all of them. Runs on ranks.

The ranks speak of it over a communicator of its own: so nothing comes between the operations that are observed, and
when one of those fails the others' part can still be gathered.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.byte_exchange import broadcast_bytes, gather_bytes
from sparkdl.collective.clock_offset import SharedClock, measure_offset
from sparkdl.collective.deadline import Deadline
from sparkdl.collective.live_timeline import LiveTimeline
from sparkdl.collective.rendezvous import PrefixRendezvous
from sparkdl.collective.telemetry import label_places
from sparkdl.collective.trace_events import describe_rank, operation_events
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, ParamError
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.telemetry import Recorded, Telemetry

logger = logging.getLogger(__name__)

_REST_S = 5.0
"""How long rank 0 waits for what the others saw after one of them was lost."""


class Timeline:
    """A timeline that runs. All ranks make it and stop it together.

    Args:
        aside: a communicator of the ranks for the timeline alone, which closes it.
        telemetry: of the communicators to observe.
        path: the file, on rank 0's machine.
        max_events: how many operations of each communicator are kept, the latest ones.
        is_live: whether rank 0 writes what it sees meanwhile.

    Raises:
        ParamError: on every rank, if rank 0 cannot write the file.
    """

    def __init__(
        self, aside: Communicator, telemetry: Telemetry, path: Path, *, max_events: int, is_live: bool
    ) -> None:
        self._aside = aside
        self._telemetry = telemetry
        self._path = path
        self._raise_together(_try_to_write(path) if aside.rank == 0 else "", None)
        self._first_offset = measure_offset(aside)
        # The file's time begins here, on rank 0's clock.
        begin = np.array([time.monotonic_ns(), time.time_ns() // 1000], np.int64)
        aside.broadcast(begin, root=0, name="beginning of the timeline")
        self._begin_ns, self._begin_epoch_us = map(int, begin)
        self._rendezvous = PrefixRendezvous(aside.rendezvous, f"{aside.name}/{self._begin_ns}")
        is_live = is_live and aside.rank == 0
        telemetry.start_recording(max_events, has_news=is_live)
        self._live = LiveTimeline(path, telemetry, self._world_rank(0), self._begin_ns) if is_live else None

    def stop(self, *, timeout_s: float | None = None) -> None:
        """End the recording and write the file; collective.

        Where ranks were lost rank 0 writes what the others saw, and a warning.

        Args:
            timeout_s: deadline of each step; the communicator's own when None.

        Raises:
            ParamError: on every rank, if rank 0 cannot write the file.
        """
        if self._live is not None:
            self._live.close()
        recorded = self._telemetry.stop_recording()
        clock = SharedClock(first=self._first_offset, last=self._first_offset)
        try:
            clock = SharedClock(first=clock.first, last=measure_offset(self._aside, timeout_s=timeout_s))
            seen = self._pack(recorded, clock)
            gathered = gather_bytes(self._aside, seen, root=0, name="timeline", timeout_s=timeout_s)
            problem = self._write(gathered, missing={}) if gathered else ""
            self._raise_together(problem, timeout_s)
        except CommunicatorError as error:
            self._save_the_rest(self._pack(recorded, clock), error)
        finally:
            self._aside.close()

    def _world_rank(self, rank: int) -> int:
        return self._aside.world_ranks[rank]

    def _raise_together(self, problem: str, timeout_s: float | None) -> None:
        """Raise rank 0's problem on every rank."""
        text = broadcast_bytes(
            self._aside, problem.encode(), root=0, name="state of the timeline", timeout_s=timeout_s
        ).decode()
        if text:
            raise ParamError(f"the timeline cannot be written to {self._path}: {text}")

    def _pack(self, recorded: list[Recorded], clock: SharedClock) -> bytes:
        def microseconds(time_ns: int) -> float:
            # What began before the timeline is shown from its beginning.
            return max(0, clock.to_shared(time_ns) - self._begin_ns) / 1000

        rank = self._world_rank(self._aside.rank)
        labels = label_places(part.place for part in recorded)
        seen = {
            "events": describe_rank(rank, f"rank {rank} on {socket.gethostname()}", recorded)
            + operation_events(rank, recorded, microseconds),
            "dropped": {labels[part.place]: part.num_dropped for part in recorded if part.num_dropped},
            "clock_error_us": clock.error_ns / 1000,
        }
        return zlib.compress(json.dumps(seen, separators=(",", ":")).encode(), level=1)

    def _save_the_rest(self, seen: bytes, error: CommunicatorError) -> None:
        """Gather by the rendezvous, which outlives ranks, what those that are left have seen."""
        if self._aside.rank != 0:
            self._rendezvous.set(str(self._aside.rank), seen)
            return
        gathered, missing = [seen], {}
        deadline = Deadline(_REST_S)
        for rank in range(1, self._aside.world_size):
            try:
                gathered.append(self._rendezvous.get(str(rank), deadline.remaining_s()))
            except CommunicatorTimeoutError:
                missing[rank] = str(error)
        problem = self._write(gathered, missing)
        if problem:
            raise ParamError(f"the timeline cannot be written to {self._path}: {problem}")
        if missing:
            ranks = [self._world_rank(rank) for rank in sorted(missing)]
            logger.warning("The timeline %s is without %s: %s", self._path, name_ranks(ranks), error)

    def _write(self, gathered: list[bytes], missing: dict[int, str]) -> str:
        """Write the file; what was wrong if that is not possible."""
        present = [rank for rank in range(self._aside.world_size) if rank not in missing]
        seen = {
            f"rank {self._world_rank(rank)}": json.loads(zlib.decompress(part))
            for rank, part in zip(present, gathered, strict=True)
        }
        events = [event for part in seen.values() for event in part["events"]]
        dropped = {rank: part["dropped"] for rank, part in seen.items() if part["dropped"]}
        about = {
            "start_time_since_epoch_in_micros": self._begin_epoch_us,
            "clock_error_us": {rank: part["clock_error_us"] for rank, part in seen.items()},
            "dropped": dropped,
            "missing": {f"rank {self._world_rank(rank)}": why for rank, why in missing.items()},
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


def _try_to_write(path: Path) -> str:
    try:
        path.touch()
    except OSError as error:
        return str(error)
    return ""
