"""Heartbeat of a barrier task: reports periodically to the driver that the task runs, and the health of its rank.

If the driver is out of reach, as on many Spark Connect servers, the task itself checks whether its rank hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sparkdl.launch.hangs.watch import HangWatch
from sparkdl.launch.wire.channel import DriverLink
from sparkdl.launch.wire.outcome import HealthReport, RankHealth
from sparkdl.launch.wire.spec import HangLimits

_LONGEST_S = 5.0
_SHORTEST_S = 0.1
_BEATS_PER_TIMEOUT = 8


class Heartbeat:
    """Sends heartbeats from a thread while its context is open.

    Args:
        link: connection to the driver.
        rank: rank of the task.
        health: function that returns the rank's health.
        limits: times after which the rank counts as hanging.
        on_hang: called with the reason from a thread, at most once.
    """

    def __init__(
        self,
        link: DriverLink,
        *,
        rank: int,
        health: Callable[[], RankHealth],
        limits: HangLimits,
        on_hang: Callable[[str], None],
    ) -> None:
        self._link, self._rank, self._health = link, rank, health
        self._on_hang = on_hang
        self._watch = HangWatch(limits)
        shortest_s = min(limits.hang_timeout_s, limits.silence_timeout_s)
        self._interval_s = min(_LONGEST_S, max(_SHORTEST_S, shortest_s / _BEATS_PER_TIMEOUT))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkdl-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _run(self) -> None:
        number = 0
        while not self._is_over.wait(self._interval_s):
            number += 1
            health = self._health()
            if self._link.heartbeat(number, health):
                continue
            now = time.monotonic()
            hang = self._watch.observe(now, {self._rank: HealthReport(now, number, health)})
            if hang is not None:
                self._on_hang(hang.why)
                return
