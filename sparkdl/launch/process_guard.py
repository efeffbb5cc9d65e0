"""Keeps rank processes from outliving whoever started them, and ends them with all that they started.

Runs there: in a barrier task, or in ``sparkdl run``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading

from sparkdl.errors import LaunchError

KILL_TIMEOUT_S = 30.0
"""How long a process may take to be gone after SIGKILL; one that waits in the kernel for a disk may never be."""

_SHELL = "/bin/sh"

# Waits for the end of its input, which is the end of whoever started the rank, however that came about.
_WATCH = 'read -r _; kill -s KILL -- "-$1" 2>/dev/null'


class ProcessGuard:
    """A small process that kills a rank's process group when this process dies, by SIGKILL too.

    The kernel's own parent-death signal would reach the rank alone and orphan what it has started.

    Args:
        group: number of the process group.

    Raises:
        LaunchError: if it cannot be started.
    """

    def __init__(self, group: int) -> None:
        try:
            self._process = subprocess.Popen(
                [_SHELL, "-c", _WATCH, "sparkdl-guard", str(group)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"the guard that would end a rank with its launcher cannot be started: {_SHELL}: {error.strerror}."
                " Look at the limits of processes and descriptors on this machine."
            ) from error

    def release(self) -> None:
        """Stop watching; the group is left alone."""
        self._process.kill()
        reap_killed(self._process)
        assert self._process.stdin is not None
        self._process.stdin.close()


def reap_killed(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that was sent SIGKILL, and return its exit status; what is not gone in time is left."""
    try:
        return process.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def end_process_group(group: int, exited: threading.Event, *, grace_s: float) -> None:
    """Ask a rank process to end, then kill its whole process group.

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
