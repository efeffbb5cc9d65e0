"""The pulse of a rank: says again and again, from a thread, that the rank lives and what it waits in. Runs on a rank.

It comes from Python, so it stays away also where a library holds Python's lock and does not come back. The stack of a
rank is another matter: a signal has it written by :mod:`faulthandler`, which takes no lock and works then, too.
"""

from __future__ import annotations

import faulthandler
import mmap
import signal
import threading
import time

from sparkdl.collective.telemetry.stalls import pending_waits
from sparkdl.launch.messages import MessageConnection

PULSE_S = 0.5
"""How often a rank gives its sign of life to its task."""

STACK_SIGNAL = signal.SIGRTMIN + 8
"""Has a rank write the Python stacks of all its threads; one of the signals that no library is known to use."""

PLACE_BYTES = 4096
"""The first page of the file for the stacks holds what the rank is at, in UTF-8, up to a zero."""

_MAX_WAITS = 8
_MAX_THREADS = 200


class RankPulse:
    """Begins with its creation, and ends with the process.

    Args:
        task: the connection to the barrier task.
        stacks_fd: file that the stacks are written to, behind a page for what the rank is at.
    """

    def __init__(self, task: MessageConnection, stacks_fd: int) -> None:
        self._task = task
        self._progressed_at: float | None = None
        self._place = mmap.mmap(stacks_fd, PLACE_BYTES)
        faulthandler.register(STACK_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
        threading.Thread(target=self._run, name="sparkdl-pulse", daemon=True).start()

    def note_progress(self) -> None:
        """Something has been done; from the first time on, it is told how long ago that was."""
        self._progressed_at = time.monotonic()

    def expect_no_progress(self) -> None:
        """Nothing need be done any more; until the next progress is noted, it is told of none."""
        self._progressed_at = None

    def note_place(self, place: str) -> None:
        """Note what the rank is at, for its task to read when the rank has died. In memory that both share."""
        text = place.encode()[: PLACE_BYTES - 1] + b"\0"
        self._place[: len(text)] = text

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._task.send(self._tell())
            except OSError:
                return  # the task is gone, and ends this process
            pause.wait(PULSE_S)

    def _tell(self) -> dict[str, object]:
        progressed_at = self._progressed_at
        return {
            "kind": "pulse",
            "waits": pending_waits()[:_MAX_WAITS],
            "idle_s": None if progressed_at is None else time.monotonic() - progressed_at,
            "threads": {str(thread.ident): thread.name for thread in threading.enumerate()[:_MAX_THREADS]},
        }
