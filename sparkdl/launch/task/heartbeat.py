"""What a barrier task tells the driver of its rank again and again, so that silence means something. Runs in the task.

Where the driver is out of reach, as on many Spark Connect servers, the task itself looks at whether its rank hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from sparkdl.launch.hangs.watch import HangLimits, HangWatch
from sparkdl.launch.wire.channel import DriverLink
from sparkdl.launch.wire.outcome import RankSigns

_LONGEST_S = 5.0
_SHORTEST_S = 0.1
_BEATS_PER_TIMEOUT = 8


class Heartbeat:
    """Begins when entered and ends when left.

    Args:
        link: to the driver.
        rank: the task's.
        signs: tells the rank's signs.
        limits: from when on it counts as hanging.
        on_hang: called with the reason, once at most, from a thread.
    """

    def __init__(
        self,
        link: DriverLink,
        *,
        rank: int,
        signs: Callable[[], RankSigns],
        limits: HangLimits,
        on_hang: Callable[[str], None],
    ) -> None:
        self._link, self._rank, self._signs = link, rank, signs
        self._on_hang = on_hang
        self._watch = HangWatch(limits)
        shortest_s = min(limits.hang_timeout_s, limits.silence_timeout_s)
        self._interval_s = min(_LONGEST_S, max(_SHORTEST_S, shortest_s / _BEATS_PER_TIMEOUT))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkdl-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()

    def _run(self) -> None:
        number = 0
        while not self._is_over.wait(self._interval_s):
            number += 1
            signs = self._signs()
            if self._link.beat(number, signs):
                continue
            now = time.monotonic()
            hang = self._watch.look(now, {self._rank: (now, number, signs)})
            if hang is not None:
                self._on_hang(hang.why)
                return
