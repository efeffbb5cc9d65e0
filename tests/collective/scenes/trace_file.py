"""Reads a timeline file and checks that it conforms to the Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_ROUNDING_US = 0.002


class TraceFile:
    """A well-formed timeline file.

    Attributes:
        events: all events.
        about: content of ``otherData``.
        threads: name of each thread, by (process, thread).
    """

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.events: list[Event] = content["traceEvents"]
        self.about: dict[str, Any] = content["otherData"]
        names = [event for event in self.events if event["name"] == "thread_name"]
        self.threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in names}
        self._check_events()
        self._check_slices_nest()
        self._check_queues_end()

    @property
    def processes(self) -> dict[int, str]:
        """Name of each process."""
        return {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"}

    def operations(self, rank: int, thread: str) -> list[Event]:
        """The slices of whole operations, ordered by time."""
        return [event for event in self.slices(rank, thread) if "args" in event]

    def phases(self, rank: int, thread: str, category: str) -> list[Event]:
        """The slices inside operations that have a category."""
        return [
            event for event in self.slices(rank, thread) if event["cat"] == category and "args" not in event
        ]

    def slices(self, rank: int, thread: str) -> list[Event]:
        """All slices of a thread, ordered by time."""
        return [
            event
            for event in self.events
            if event["ph"] == "X" and event["pid"] == rank and self.threads[rank, event["tid"]] == thread
        ]

    def queued(self, rank: int) -> list[Event]:
        """The beginnings of the queue phases."""
        return [event for event in self.events if event["ph"] == "b" and event["pid"] == rank]

    def _check_events(self) -> None:
        assert [event["ts"] for event in self.events] == sorted(event["ts"] for event in self.events)
        for event in self.events:
            assert event["ph"] in "XbeMi", event
            assert isinstance(event["name"], str), event
            assert isinstance(event["pid"], int), event
            assert isinstance(event["tid"], int), event
            assert event["ts"] >= 0, event
            if event["ph"] != "M":
                assert event["pid"] in self.processes, event
                assert (event["pid"], event["tid"]) in self.threads, event
            if event["ph"] == "X":
                assert event["dur"] >= 0, event

    def _check_slices_nest(self) -> None:
        """Assert that slices of a thread are nested or disjoint, as viewers draw them."""
        open_until: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for event in self.events:
            if event["ph"] != "X":
                continue
            stack = open_until[event["pid"], event["tid"]]
            while stack and stack[-1] <= event["ts"] + _ROUNDING_US:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert not stack or end <= stack[-1] + _ROUNDING_US, event
            stack.append(end)

    def _check_queues_end(self) -> None:
        begun: dict[tuple[int, str], float] = {}
        for event in self.events:
            if event["ph"] == "b":
                assert (event["pid"], event["id2"]["local"]) not in begun, event
                begun[event["pid"], event["id2"]["local"]] = event["ts"]
            elif event["ph"] == "e":
                assert begun.pop((event["pid"], event["id2"]["local"])) <= event["ts"], event
        assert not begun
