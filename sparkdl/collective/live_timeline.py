"""A timeline's file while the timeline still runs: what rank 0 sees itself. Runs on rank 0; nothing here communicates.

In the JSON Array Format, which needs no end, so that it can be opened at any time, also when the job was killed:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.collective.telemetry import Place, Recorded
from sparkdl.collective.trace_events import describe_rank, operation_events

if TYPE_CHECKING:
    from sparkdl.collective.telemetry import Telemetry

logger = logging.getLogger(__name__)

_PERIOD_S = 0.05

_encode = json.JSONEncoder(separators=(",", ":")).encode


class LiveTimeline:
    """Writes the news of a recording into a file from time to time, until it is closed.

    Args:
        path: the file; emptied.
        telemetry: which records, and has news.
        rank: of this process.
        begin_ns: when the file's time begins.
    """

    def __init__(self, path: Path, telemetry: Telemetry, rank: int, begin_ns: int) -> None:
        self._path = path
        self._telemetry = telemetry
        self._rank, self._begin_ns = rank, begin_ns
        self._places: list[Place] = []
        """Of the communicators that were seen, in the order of their threads."""
        path.write_text("[\n", encoding="utf-8")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"timeline {path}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write no more."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            try:
                self._write_news()
            except OSError as error:
                logger.warning("What goes on cannot be written to the timeline %s: %s", self._path, error)
                return

    def _write_news(self) -> None:
        news = {part.place: part for part in self._telemetry.take_news()}
        new_places = [place for place in news if place not in self._places]
        self._places += new_places
        parts = [news.get(place, Recorded(place=place)) for place in self._places]
        events = operation_events(self._rank, parts, self._microseconds)
        if new_places:
            label = f"rank {self._rank} on {socket.gethostname()}"
            events = describe_rank(self._rank, label, parts) + events
        if events:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{_encode(event)},\n" for event in events)

    def _microseconds(self, time_ns: int) -> float:
        return max(0, time_ns - self._begin_ns) / 1000
