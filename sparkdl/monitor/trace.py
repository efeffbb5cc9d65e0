"""A trace of some steps: what torch's profiler sees on each rank, beside the operations of the communicator.

Rank 0 gathers it as a timeline of the communicator (:mod:`sparkdl.collective.telemetry.timeline`), whose clocks are
aligned, and sends the file to the driver. In the file a rank is a process, with threads for the program and for each
process set, and each of its GPUs is a further process. All ranks begin and end at the same step.
"""

from __future__ import annotations

import base64
import gzip
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError
from sparkdl.monitor.communication import world_communicator

if TYPE_CHECKING:
    from sparkdl.collective import Communicator

_logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_GPUS_PER_RANK = 64
_FIRST_GPU = 1 << 20
"""Process ids of GPUs in the file; those of ranks are their numbers."""


class StepTrace:
    """Traces this rank from the beginning of one step to the end of another one.

    Args:
        first: number of the first step.
        last: number of the last step.
        report: function that sends an event to the driver.

    Attributes:
        is_running: whether a step is being traced.
    """

    def __init__(self, first: int, last: int, report: Callable[[dict[str, Any]], None]) -> None:
        self._first, self._last, self._report = first, last, report
        self.is_running = False
        self._has_ended = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._communicator: Communicator | None = None
        self._profile: Any = None
        self._step: Any = None

    def begin_step(self, number: int) -> None:
        """Begin to trace if this is the first step. Collective in this case."""
        if not self._has_ended and not self.is_running and self._first <= number <= self._last:
            self._start()
        if self.is_running:
            from torch.profiler import record_function

            self._step = record_function(f"step {number}")
            self._step.__enter__()

    def end_step(self, number: int) -> None:
        """End the trace if this was the last step. Collective in this case."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self.is_running and number >= self._last:
            self.end()

    def _start(self) -> None:
        communicator = world_communicator()
        if communicator is None or communicator.telemetry.is_recording:
            self._has_ended = True
            why = "it has no communicator" if communicator is None else "another timeline is being recorded"
            _logger.warning("No step of this rank is traced: %s.", why)
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print a line at each beginning and end
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._folder = tempfile.TemporaryDirectory(prefix="sparkdl-trace-")
        try:
            communicator.start_timeline(self._file("trace"))
        except ParamError as error:  # on every rank, if rank 0 cannot write
            self._has_ended = True
            _logger.warning("No step of this rank is traced: %s", error)
            self._clean_up()
            return
        self._communicator, self.is_running = communicator, True
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        try:
            self._profile = profile(activities=activities)
            self._profile.start()
        except Exception as error:  # of Kineto, such as when the program has a profiler of its own
            self._profile = None
            _logger.warning("The trace has no operators of this rank: %s: %s", type(error).__name__, error)

    def end(self) -> None:
        """End the trace, and send it to the driver. Collective.

        If the ranks have formed another world meanwhile, nothing is written.
        """
        assert self._communicator is not None
        if world_communicator() is not self._communicator:
            self.abandon()
            _logger.warning("No step of this rank is traced: the ranks have formed another world meanwhile.")
            return
        content = self._stop()
        communicator = self._communicator
        rank = communicator.world_ranks[communicator.rank]
        try:
            communicator.stop_timeline(more=lambda to_file: list(profile_events(rank, content, to_file)))
            if communicator.rank == 0:
                self._send(Path(self._file("trace")).read_bytes())
        except (OSError, ParamError) as error:  # of a full disk, on every rank, or of a driver that has ended
            _logger.warning("There is no trace of this rank's steps: %s", error)
        finally:
            self._clean_up()

    def abandon(self) -> None:
        """End the trace of a training that has failed; nothing is written."""
        if self.is_running:
            self._stop()
            assert self._communicator is not None
            self._communicator.drop_timeline()
            self._clean_up()

    def _stop(self) -> Mapping[str, Any]:
        """End torch's profile; return its content, without events if it could not be written."""
        profile, self._profile = self._profile, None
        self.is_running, self._has_ended = False, True
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        try:
            if profile is not None:
                profile.stop()
                profile.export_chrome_trace(self._file("profile"))
                content: Mapping[str, Any] = json.loads(
                    Path(self._file("profile")).read_text(encoding="utf-8")
                )
                return content
        except Exception as error:  # of Kineto, whose file a full disk cuts off
            _logger.warning("The trace has no operators of this rank: %s: %s", type(error).__name__, error)
        return {"traceEvents": []}

    def _clean_up(self) -> None:
        assert self._folder is not None
        self._folder.cleanup()

    def _file(self, name: str) -> str:
        assert self._folder is not None
        return os.path.join(self._folder.name, f"{name}.json")

    def _send(self, content: bytes) -> None:
        packed = gzip.compress(content, compresslevel=5)
        starts = range(0, len(packed), _CHUNK_BYTES)
        for number, start in enumerate(starts):
            part = base64.b64encode(packed[start : start + _CHUNK_BYTES]).decode()
            self._report({"kind": "trace", "number": number, "part": part, "is_last": start == starts[-1]})


def profile_events(
    rank: int, content: Mapping[str, Any], to_file: Callable[[int], float]
) -> Iterator[dict[str, Any]]:
    """Yield the events of a profile for a timeline of all ranks.

    Args:
        rank: number of the rank.
        content: content of the file that torch's profiler has written.
        to_file: converts a time of this rank's ``time.monotonic_ns()`` to microseconds of the timeline.
    """
    # The profiler has the time of day; without a base, its times are since 1970.
    base = int(content.get("baseTimeNanoseconds", 0)) + _monotonic_minus_day_ns()
    pid = os.getpid()
    gpus: set[int] = set()
    for event in content["traceEvents"]:
        process = event.get("pid")
        if event["ph"] == "M" and not (event["name"].startswith("thread_") and isinstance(process, int)):
            continue  # names of processes; these are ranks here
        if process == pid:
            where = rank
        elif isinstance(process, int):
            where = _FIRST_GPU + rank * _GPUS_PER_RANK + process
            gpus.add(process)
        else:
            continue  # what the profiler says about itself
        moved = {**event, "pid": where, "ts": to_file(base + round(1000 * event["ts"]))}
        if "id" in event:  # arrows between events, whose ids are those of the rank
            moved["id"] = rank << 32 | int(event["id"])  # Perfetto takes numbers
        yield moved
    for gpu in sorted(gpus):
        about: dict[str, Any] = {
            "ph": "M",
            "pid": _FIRST_GPU + rank * _GPUS_PER_RANK + gpu,
            "tid": 0,
            "ts": 0,
        }
        yield {**about, "name": "process_name", "args": {"name": f"GPU {gpu} of rank {rank}"}}
        yield {**about, "name": "process_sort_index", "args": {"sort_index": rank}}


_NUM_READINGS = 9


def _monotonic_minus_day_ns() -> int:
    """Return what added to a time of day gives ``time.monotonic_ns()``, of the readings with the least time between."""
    readings = []
    for _ in range(_NUM_READINGS):
        before, day, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, (before + after) // 2 - day))
    return min(readings)[1]


class TraceFile:
    """Writes the trace that rank 0 sends, on the driver. A name that ends in ``.gz`` gets a compressed file.

    It is written beside the file, which it replaces once it is whole.

    Args:
        path: path of the file.

    Raises:
        ParamError: if the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._unfinished = self._path.with_name(f"{self._path.name}.part")
        self._parts: list[bytes] = []
        self._is_written = False
        try:
            if self._path.is_dir():
                raise IsADirectoryError("it is a folder")
            self._unfinished.touch()
        except OSError as error:
            raise ParamError(
                f"trace of the Monitor is {path!r}, which cannot be written: {error}."
            ) from error

    def take(self, event: Mapping[str, Any]) -> None:
        """Take a part of the trace; write the file with the last one."""
        if event["number"] == 0:  # an earlier attempt may have ended in the middle of its trace
            self._parts = []
        self._parts.append(base64.b64decode(event["part"]))
        if not event["is_last"]:
            return
        packed, self._parts = b"".join(self._parts), []
        self._unfinished.write_bytes(packed if self._path.suffix == ".gz" else gzip.decompress(packed))
        self._unfinished.replace(self._path)
        self._is_written = True
        _logger.info("The trace is in %s; https://ui.perfetto.dev opens it.", self._path)

    def close(self) -> None:
        """Log a warning if there was no trace, and remove what is unfinished."""
        if not self._is_written:
            _logger.warning(
                "There is no trace of this run in %s: its steps did not end, or it could not be written.",
                self._path,
            )
        self._unfinished.unlink(missing_ok=True)
