"""Heartbeats of a rank, sent from one of its threads.

They report that the rank runs, the operations in which it waits, and how long ago it last reported progress. Python
code sends them, so they also stop if a library holds the GIL and does not return. The barrier task then
takes the rank's stacks from outside, as :mod:`sparkdl.launch.rank.stacks` says.
"""

from __future__ import annotations

import threading
import time

from sparkdl.collective.telemetry.stalls import pending_waits
from sparkdl.launch.wire.messages import HEARTBEAT_S, MessageConnection

_MAX_WAITS = 8
_MAX_THREADS = 200


class RankHeartbeat:
    """Thread that sends heartbeats; it starts with the creation of the object and ends with the process.

    Args:
        task: connection to the barrier task.

    Attributes:
        progressed_at: time of ``time.monotonic()`` of the last progress; None while none is to be expected.
    """

    def __init__(self, task: MessageConnection) -> None:
        self._task = task
        self.progressed_at: float | None = None
        self._world = 0
        threading.Thread(target=self._run, name="sparkdl-heartbeat", daemon=True).start()

    def enter(self, world: int) -> None:
        """Note that the rank is in a world of this number from now on, and begins its work there."""
        self._world, self.progressed_at = world, None

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._task.send(self._report())
            except OSError:
                return  # the task has ended, and ends this process
            pause.wait(HEARTBEAT_S)

    def _report(self) -> dict[str, object]:
        progressed_at = self.progressed_at
        world = self._world  # before the waits: those of an earlier world have ended when this one is entered
        return {
            "kind": "heartbeat",
            "world": world,
            "waits": pending_waits()[:_MAX_WAITS],
            "idle_s": None if progressed_at is None else time.monotonic() - progressed_at,
            "threads": {str(thread.ident): thread.name for thread in threading.enumerate()[:_MAX_THREADS]},
        }
