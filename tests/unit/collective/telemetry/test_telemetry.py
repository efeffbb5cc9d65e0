from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkdl.collective.telemetry.monitor import (
    CommunicatorKey,
    OperationMonitor,
    Telemetry,
    label_communicators,
)


@dataclass(eq=False)
class Actor:
    """A communicator without other ranks that counts operations."""

    name: str
    world_ranks: tuple[int, ...] = (0, 1)
    monitors: tuple[OperationMonitor, ...] = field(default_factory=lambda: (OperationMonitor(),))

    def act(self, kind: str = "barrier", num_bytes: int = 0) -> None:
        with self.monitors[0].operation(kind, num_bytes=num_bytes):
            pass


def watched(telemetry: Telemetry, name: str) -> Actor:
    actor = Actor(name)
    telemetry.watch(actor)
    return actor


def counts(telemetry: Telemetry, *, reset: bool = False) -> dict[str, dict[str, int]]:
    measured, _ = telemetry.measure(reset=reset)
    return {
        measurement.key.name: {kind: totals.num_operations for kind, totals in measurement.totals.items()}
        for measurement in measured
    }


def test_totals_outlive_their_communicator() -> None:
    telemetry = Telemetry()
    world = watched(telemetry, "world")
    for _ in range(3):
        process_set = watched(telemetry, "set")
        process_set.act()
        del process_set
    world.act()
    assert counts(telemetry) == {"set": {"barrier": 3}, "world": {"barrier": 1}}
    assert counts(telemetry) == {"set": {"barrier": 3}, "world": {"barrier": 1}}


def test_reset_clears_the_totals_and_drops_closed_communicators() -> None:
    telemetry = Telemetry()
    world, gone = watched(telemetry, "world"), watched(telemetry, "gone")
    world.act()
    gone.act()
    del gone
    assert counts(telemetry, reset=True) == {"gone": {"barrier": 1}, "world": {"barrier": 1}}
    assert counts(telemetry) == {"world": {}}
    world.act("allreduce", 8)
    assert counts(telemetry) == {"world": {"allreduce": 1}}


def test_recording_covers_communicators_that_open_and_close_during_it() -> None:
    telemetry = Telemetry()
    world = watched(telemetry, "world")
    telemetry.start_recording(4)
    for _ in range(3):
        process_set = watched(telemetry, "set")
        process_set.act()
        process_set.act()
        del process_set
    world.act()
    recorded = {part.key.name: part for part in telemetry.stop_recording()}
    assert len(recorded["set"].records) == 4
    assert recorded["set"].num_dropped == 2
    assert len(recorded["world"].records) == 1
    world.act()
    assert telemetry.stop_recording()[0].records == []


def test_news_of_a_recording_are_returned_once_and_again_at_its_end() -> None:
    telemetry = Telemetry()
    world = watched(telemetry, "world")
    telemetry.start_recording(3, has_news=True)
    told = []
    for number in range(2):
        telemetry.mark("world", f"mark {number}")
        world.act("allreduce", 8)
        world.act()
        told.append([(len(part.records), [mark[1] for mark in part.marks]) for part in telemetry.take_news()])
    assert told == [[(2, ["mark 0"])], [(2, ["mark 1"])]]
    (recorded,) = telemetry.stop_recording()
    assert ([record.kind for record in recorded.records], recorded.num_dropped) == (
        ["barrier", "allreduce", "barrier"],
        1,
    )
    assert [mark[1] for mark in recorded.marks] == ["mark 0", "mark 1"]
    telemetry.mark("world", "too late")
    assert telemetry.stop_recording()[0].marks == deque()


def test_process_sets_with_equal_names_and_other_ranks_are_measured_separately() -> None:
    telemetry = Telemetry()
    pairs = [Actor("pair", (0, 1)), Actor("pair", (0, 2))]
    for pair in pairs:
        telemetry.watch(pair)
    telemetry.start_recording(8)
    pairs[0].act()
    pairs[1].act()
    pairs[1].act()
    first, second = CommunicatorKey("pair", (0, 1)), CommunicatorKey("pair", (0, 2))
    measured, _ = telemetry.measure()
    assert {measurement.key: measurement.totals["barrier"].num_operations for measurement in measured} == {
        first: 1,
        second: 2,
    }
    recorded = {part.key: len(part.records) for part in telemetry.stop_recording()}
    assert recorded == {first: 1, second: 2}
    assert label_communicators([first, second, CommunicatorKey("world", (0, 1, 2))]) == {
        first: "pair of ranks 0, 1",
        second: "pair of ranks 0, 2",
        CommunicatorKey("world", (0, 1, 2)): "world",
    }


class CollectingLock:
    """A lock of a monitor in whose block a communicator is dropped, as the garbage collector may do at any line."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._lock, self._drop = threading.Lock(), drop

    def __enter__(self) -> None:
        self._lock.acquire()
        self._drop()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def ends(*threads: threading.Thread) -> bool:
    for thread in threads:
        thread.join(30.0)
    return not any(thread.is_alive() for thread in threads)


def test_a_communicator_may_be_dropped_while_its_totals_are_read() -> None:
    telemetry = Telemetry()
    alive = [watched(telemetry, "gone")]
    alive[0].act()
    alive[0].monitors[0]._lock = CollectingLock(alive.clear)
    measuring = threading.Thread(target=counts, args=[telemetry], daemon=True)
    measuring.start()
    assert ends(measuring)
    assert counts(telemetry) == {"gone": {"barrier": 1}}


def test_a_communicator_may_be_dropped_at_the_end_of_an_operation_of_another_one_that_is_read() -> None:
    telemetry = Telemetry()
    world, alive = watched(telemetry, "world"), [watched(telemetry, "gone")]
    alive[0].act()
    measuring = threading.Thread(target=counts, args=[telemetry], daemon=True)

    def drop() -> None:
        if alive:
            measuring.start()
            measuring.join(0.2)  # it waits for this lock, or for its turn
            alive.clear()

    world.monitors[0]._lock = CollectingLock(drop)
    acting = threading.Thread(target=world.act, daemon=True)
    acting.start()
    assert ends(acting, measuring)
    assert counts(telemetry) == {"gone": {"barrier": 1}, "world": {"barrier": 1}}
