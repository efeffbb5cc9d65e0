"""Guards that end a rank, and all processes that it started, when the process that started the rank dies.

A guard is a small process that waits until its parent ends, even by SIGKILL, and then kills the process group of the
rank. Runs in the process that starts ranks: a barrier task, or ``sparkdl run``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from sparkdl.errors import LaunchError

KILL_TIMEOUT_S = 30.0
"""How long a process may take to end after SIGKILL; one that waits in the kernel for a disk may never end."""

SHELL = "/bin/sh"

# Its input ends when the process that started the rank ends for any reason.
_WATCH = 'read -r _; kill -s KILL -- "-$1" 2>/dev/null'


def _start_guard(group: int) -> subprocess.Popen[bytes]:
    """Start a small process that kills a rank's process group when this process dies, even by SIGKILL.

    The kernel's own parent-death signal would reach only the rank, not the processes that it has started.

    Raises:
        LaunchError: if the guard cannot be started.
    """
    try:
        return subprocess.Popen(
            [SHELL, "-c", _WATCH, "sparkdl-guard", str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(
            f"the guard that would end a rank with its launcher cannot be started: {SHELL}: {error.strerror}."
            " Look at the limits of processes and descriptors on this machine."
        ) from error


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and wait for its end; after a timeout it is left unreaped."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT_S)


def end_process_group(group: int, exited: threading.Event, *, grace_s: float) -> None:
    """Ask a rank process to end, then kill its whole process group.

    Args:
        group: the rank's process id; it leads a group of its own and is not reaped yet, so the number is still valid.
        exited: set when the rank has ended.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    if not exited.is_set():
        signal_group(group, signal.SIGTERM)
        exited.wait(grace_s)
    # The leader may have ended while processes that it started still run.
    signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to the processes of a group that are left, if any."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def exit_status(ending: os.waitid_result) -> int:
    """The exit status of a process that :func:`os.waitid` reports, in the form of :class:`subprocess.Popen`."""
    return ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status


class GuardedProcess:
    """One process, in a group of its own; its standard output and standard error come through a pipe each.

    Args:
        command: the program and its arguments.
        environment: environment variables of the process.
        pass_fds: file descriptors that the process inherits.
        on_exit: called from a thread once the process has ended.

    Attributes:
        pid: process id of the process.
        outputs: reading ends of the pipes.
        exited: event that is set once the process has ended.
        status: exit status of the ended process, as :class:`subprocess.Popen` reports it; None before its end.

    Raises:
        OSError: if there is no such program.
        LaunchError: if the guard cannot be started; the process is then ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        on_exit: Callable[[], None],
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            pass_fds=pass_fds,
            # A group of its own, so that all processes that it starts can be ended with it.
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.outputs: list[IO[bytes]] = [self._process.stdout, self._process.stderr]
        try:
            self._guard = _start_guard(self.pid)
        except BaseException:
            os.killpg(self.pid, signal.SIGKILL)
            _kill(self._process)
            for output in self.outputs:
                output.close()
            raise
        self._on_exit = on_exit
        self._is_reaped = False
        self._is_abandoned = False
        self.exited = threading.Event()
        self.status: int | None = None
        threading.Thread(target=self._await_exit, name=f"sparkdl-exit-{self.pid}", daemon=True).start()

    def end(self, *, grace_s: float) -> None:
        """End the process and all processes that it has started: SIGTERM, then SIGKILL. May be called again.

        If SIGKILL does not end the process in time, which ``exited`` shows, it is abandoned.

        The caller has to read its outputs to the end and close them.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL.
        """
        if self._is_reaped or self._is_abandoned:
            return
        end_process_group(self.pid, self.exited, grace_s=grace_s)
        # If the process were reaped earlier, the waiting thread would have no child to wait for.
        if not self.exited.wait(KILL_TIMEOUT_S):
            self._is_abandoned = True
            if not self.exited.is_set():
                return  # the waiting thread reaps it if it ever ends
        self._reap()

    def _reap(self) -> None:
        _kill(self._guard)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._process.wait()  # it has ended
        self._is_reaped = True

    def _await_exit(self) -> None:
        # Not reaped yet: its process id must stay in use until its process group has been ended.
        ending = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ending is not None, "waitid returns None with WNOHANG alone"
        self.status = exit_status(ending)
        self.exited.set()
        self._on_exit()
        if self._is_abandoned:
            self._reap()


def describe_exit(status: int) -> str:
    """Describe an exit status: ``exited with status 3``, ``was ended by SIGSEGV``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
