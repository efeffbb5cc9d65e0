"""Ends rank processes, and everything that they started, when the process that started them ends.

A guard is a small process that waits for the end of the process that started it, by SIGKILL too, and then kills the
process group of the rank. Runs in the process that starts ranks: a barrier task, or ``sparkdl run``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

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


class GuardedProcess:
    """One process, in a group of its own; its output comes through pipes.

    Args:
        command: the program and its arguments.
        environment: its variables.
        pass_fds: file descriptors that it inherits.
        separate_errors: it has a pipe for standard error, too; otherwise that goes where its output goes.
        on_exit: called once it has ended by itself or was ended, from a thread.

    Attributes:
        exited: set once it has ended.
        status: its exit status then, as of :class:`subprocess.Popen`; None before.

    Raises:
        OSError: if there is no such program.
        LaunchError: if it cannot be guarded; it was ended then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        separate_errors: bool = False,
        on_exit: Callable[[], None],
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate_errors else subprocess.STDOUT,
            env=dict(environment),
            pass_fds=pass_fds,
            # A group of its own, so that whatever it starts can be ended with it.
            start_new_session=True,
        )
        try:
            self._guard = ProcessGuard(self.pid)
        except BaseException:
            os.killpg(self.pid, signal.SIGKILL)
            reap_killed(self._process)
            for output in self.outputs:
                output.close()
            raise
        self._on_exit = on_exit
        self._is_reaped = False
        self._is_given_up = False
        self.exited = threading.Event()
        self.status: int | None = None
        threading.Thread(target=self._await_exit, name=f"sparkdl-exit-{self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def outputs(self) -> list[IO[bytes]]:
        """Our ends of its pipes: standard output, and standard error where that is separate."""
        return [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe is not None]

    def end(self, *, grace_s: float) -> None:
        """End it and all that it has started; it may take ``grace_s`` after a polite request. May be called again.

        What SIGKILL does not end in time, as ``exited`` then tells, is left to itself.

        Its outputs are the caller's to read to their end and to close.
        """
        if self._is_reaped or self._is_given_up:
            return
        end_process_group(self.pid, self.exited, grace_s=grace_s)
        # Reaping it earlier would leave the waiting thread without a child.
        if not self.exited.wait(KILL_TIMEOUT_S):
            self._is_given_up = True
            if not self.exited.is_set():
                return  # the waiting thread reaps it, should it ever end
        self._reap()

    def _reap(self) -> None:
        self._guard.release()
        self._process.wait()  # it has ended
        self._is_reaped = True

    def _await_exit(self) -> None:
        # Not reaped yet: its number must stay taken until its process group has been ended.
        ending = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ending is not None, "waitid was not told to return at once"
        self.status = ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status
        self.exited.set()
        self._on_exit()
        if self._is_given_up:
            self._reap()


def how_it_ended(status: int) -> str:
    """An exit status in words: ``exited with status 3``, ``was ended by SIGSEGV``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
