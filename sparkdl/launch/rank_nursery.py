"""Ranks that start at once: forked from a process that has imported what they need, and stays for the next fit.

Runs in the Python worker that runs a barrier task. Such a worker serves one task after the other, and Spark ends it
when it was idle for a minute. Importing torch takes a rank two seconds; the second fit does not wait for them any more.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from sparkdl.errors import LaunchError
from sparkdl.launch.process_guard import end_process_group

_END_TIMEOUT_S = 2.0
"""How long a process that ranks are forked from may take to end when it is told to."""


class RankNursery:
    """The process that ranks are forked from, one at a time. It ends when this process does.

    Args:
        environment: its variables, and those of its ranks.
        modules: what it imports.

    Raises:
        LaunchError: if it cannot be started.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.key = (dict(environment), tuple(modules))
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sparkdl.launch.nursery_process", str(theirs.fileno()), *modules],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=dict(environment),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                self.connection.close()
                raise LaunchError(
                    f"the process that a rank is forked from cannot be started: {sys.executable}: {error.strerror}. "
                    "Look at the limits of processes and descriptors on this machine."
                ) from error

    def ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a request, with file descriptors.

        Raises:
            OSError: if the process has ended.
        """
        socket.send_fds(self.connection, [json.dumps(request).encode()], fds)

    def hear(self) -> dict[str, int] | None:
        """Wait for what the process tells; None when it has ended."""
        try:
            answer = self.connection.recv(1 << 16)
        except OSError:
            return None
        return json.loads(answer) if answer else None

    def close(self) -> int:
        """End it, and a rank that it has; return its exit status."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has ended
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it imports yet, and so has forked nothing
            self._process.kill()
            status = self._process.wait()
        self.connection.close()
        return status


class ForkedRank:
    """A rank process, in a group of its own, with its output in a pipe.

    Args:
        environment: its variables.
        more_variables: that it has besides; libraries that are imported already do not see them.
        modules: what it need not import any more.
        name: by which ``ps`` calls it, of at most 15 characters.
        task: file descriptor of its connection to the task.
        inherited: further descriptors, by the variables that tell it their numbers.
        on_exit: called once it has ended by itself or was ended, from a thread.

    Attributes:
        outputs: our ends of its pipes.
        exited: set once it has ended.
        status: its exit status then, as of :class:`subprocess.Popen`; None before.

    Raises:
        LaunchError: if it cannot be started.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        more_variables: Mapping[str, str],
        modules: Sequence[str],
        name: str,
        task: int,
        inherited: Mapping[str, int],
        on_exit: Callable[[], None],
    ) -> None:
        reading, writing = os.pipe()
        self.outputs: list[IO[bytes]] = [os.fdopen(reading, "rb")]
        request = {
            "kind": "fork",
            "variables": dict(more_variables),
            "folder": os.getcwd(),
            "name": name,
            "inherited": list(inherited),
        }
        try:
            self._nursery = _ask_any(environment, modules, request, [writing, task, *inherited.values()])
        except BaseException:
            self.outputs[0].close()
            raise
        finally:
            os.close(writing)
        self._on_exit = on_exit
        self._pid: int | None = None
        self._has_pid = threading.Event()
        self._is_reaped = False
        self._nursery_has_ended = False
        self.exited = threading.Event()
        self.status: int | None = None
        threading.Thread(target=self._await_exit, name=f"sparkdl-exit-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id, waiting until it has one.

        Raises:
            LaunchError: if it could not be started.
        """
        self._has_pid.wait()
        if self._pid is None:
            raise LaunchError(f"the process that a rank is forked from ended with status {self.status}")
        return self._pid

    def end(self, *, grace_s: float) -> None:
        """End it and all that it has started; it may take ``grace_s`` after a polite request. May be called again.

        Its outputs are the caller's to read to their end and to close.
        """
        if self._is_reaped:
            return
        if not self._has_pid.is_set():
            self._nursery.close()  # with the rank, should it be there by now
        if self._pid is not None:
            end_process_group(self._pid, self.exited, grace_s=grace_s)
        self.exited.wait()
        self._is_reaped = True
        if self._nursery_has_ended:
            return
        try:
            self._nursery.ask({"kind": "reap"})
        except OSError:  # somebody ended it after the rank
            self._nursery.close()
            return
        with _choosing:
            _keep_alone(self._nursery)

    def _await_exit(self) -> None:
        while (news := self._nursery.hear()) is not None:
            if "pid" in news:
                self._pid = news["pid"]
                self._has_pid.set()
            else:
                self.status = news["exited"]
                break
        else:
            self._nursery_has_ended = True
            self.status = self._nursery.close() or -signal.SIGKILL
            if self._pid is not None:
                end_process_group(self._pid, self.exited, grace_s=0.0)
        self._has_pid.set()
        self.exited.set()
        self._on_exit()


_idle: list[RankNursery] = []
_choosing = threading.Lock()


def prepare_rank(environment: Mapping[str, str], modules: Sequence[str]) -> None:
    """Have a process import what the next rank of these variables and modules needs, unless one does already."""
    with _choosing:
        if all(nursery.key != (dict(environment), tuple(modules)) for nursery in _idle):
            _keep_alone(RankNursery(environment, modules))


def _ask_any(
    environment: Mapping[str, str], modules: Sequence[str], request: Mapping[str, Any], fds: Sequence[int]
) -> RankNursery:
    """Send a request to an idle process that suits, or to a new one, and return who got it."""
    with _choosing:
        for nursery in list(_idle):
            if nursery.key != (dict(environment), tuple(modules)):
                continue
            _idle.remove(nursery)
            try:
                nursery.ask(request, fds)
            except OSError:  # somebody ended it meanwhile
                nursery.close()
            else:
                return nursery
    nursery = RankNursery(environment, modules)
    nursery.ask(request, fds)
    return nursery


def _keep_alone(nursery: RankNursery) -> None:
    """Keep one and no other, as it holds memory."""
    for other in _idle:
        other.close()
    _idle[:] = [nursery]


@atexit.register
def _close_idle() -> None:
    for nursery in _idle:
        nursery.close()
    _idle.clear()
