"""Keeps rank processes from outliving their barrier task, and ends them with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

# Waits for the end of its input, which is the end of the barrier task, however that came about.
_WATCH = 'read -r _; kill -s KILL -- "-$1" 2>/dev/null'


class ProcessGuard:
    """A small process that kills a rank's process group when the barrier task dies, by SIGKILL too.

    The kernel's own parent-death signal would reach the rank alone and orphan what it has started.

    Args:
        group: number of the process group.
    """

    def __init__(self, group: int) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sparkdl-guard", str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Stop watching; the group is left alone."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def end_process_group(group: int, exited: threading.Event, *, grace_s: float) -> None:
    """Ask a rank process to end, then kill its whole process group. Runs in the barrier task.

    Args:
        group: the rank's process id; it leads a group of its own and is not reaped yet, so the number is still its.
        exited: is set when the rank has ended.
        grace_s: how long it may take after SIGTERM before SIGKILL.
    """
    if not exited.is_set():
        _signal_group(group, signal.SIGTERM)
        exited.wait(grace_s)
    # The leader may be gone while processes that it started still run.
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
