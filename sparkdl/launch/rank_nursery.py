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
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any
from weakref import WeakSet

from sparkdl.errors import LaunchError
from sparkdl.launch.guarded_process import how_it_ended
from sparkdl.launch.process_guard import end_process_group

_END_TIMEOUT_S = 2.0
"""How long a process that ranks are forked from may take to end when it is told to."""

_LAST_BYTES = 4096
"""How much of what it printed is told when it dies before it has forked a rank."""

_all: WeakSet[RankNursery] = WeakSet()


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
        # What it says while it imports belongs to no rank, and is of interest if it dies of it.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sparkdl.launch.nursery_process", str(theirs.fileno()), *modules],
                    stdin=subprocess.DEVNULL,
                    stdout=self._said,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                self.connection.close()
                self._said.close()
                raise LaunchError(
                    f"the process that a rank is forked from cannot be started: {sys.executable}: {error.strerror}. "
                    "Look at the limits of processes and descriptors on this machine."
                ) from error
        _all.add(self)

    def ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a request, with file descriptors.

        Raises:
            OSError: if the process has ended.
        """
        socket.send_fds(self.connection, [json.dumps(request).encode()], fds)

    def hear(self) -> dict[str, Any] | None:
        """Wait for what the process tells; None when it has ended."""
        try:
            answer = self.connection.recv(1 << 16)
        except OSError:
            return None
        return json.loads(answer) if answer else None

    def last_words(self) -> str:
        """Return the end of what it has printed."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _LAST_BYTES))
        return self._said.read().decode("utf-8", "replace")

    def abandon(self) -> None:
        """Leave it to the process that this one was forked from."""
        self.connection.close()

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
        on_start: called from a thread once the process is there.
        on_exit: called from a thread once it has ended by itself or was ended, or could not be started.

    Attributes:
        output: our end of its pipe.
        exited: set once it has ended.
        status: its exit status then, as of :class:`subprocess.Popen`; None before.
        refusal: why it could not be started, and what was printed meanwhile; None if it could.

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
        on_start: Callable[[], None],
        on_exit: Callable[[], None],
    ) -> None:
        request = {
            "kind": "fork",
            "variables": dict(more_variables),
            "folder": os.getcwd(),
            "name": name,
            "inherited": list(inherited),
        }
        reading, writing = os.pipe()
        self.output: IO[bytes] = os.fdopen(reading, "rb")
        try:
            self._nursery = _ask_any(environment, modules, request, [writing, task, *inherited.values()])
        except BaseException:
            self.output.close()
            raise
        finally:
            os.close(writing)
        self._on_start, self._on_exit = on_start, on_exit
        self._pid: int | None = None
        self._is_settled = threading.Event()
        self.refusal: tuple[str, str] | None = None
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
        self._is_settled.wait()
        if self._pid is None:
            raise LaunchError(self.refusal[0] if self.refusal else "it was ended before it was there")
        return self._pid

    def end(self, *, grace_s: float) -> None:
        """End it and all that it has started; it may take ``grace_s`` after a polite request. May be called again.

        Its output is the caller's to read to its end and to close.
        """
        if self._is_reaped:
            return
        if not self._is_settled.is_set():
            self._nursery.close()  # with the rank, should it be there by now
        if self._pid is not None:
            end_process_group(self._pid, self.exited, grace_s=grace_s)
        self.exited.wait()
        self._is_reaped = True
        if self._nursery_has_ended:
            return
        try:
            if self._pid is not None:
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
                self._is_settled.set()
                self._on_start()
                continue
            self.status = news.get("exited")
            if "failure" in news:
                self.refusal = news["failure"], ""
            break
        else:
            self._nursery_has_ended = True
            self.status = self._nursery.close() or -signal.SIGKILL
            if self._pid is not None:
                end_process_group(self._pid, self.exited, grace_s=0.0)
            else:
                how = f"the process that imports for it {how_it_ended(self.status)}"
                self.refusal = how, self._nursery.last_words()
        self._is_settled.set()
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
    try:
        nursery.ask(request, fds)
    except OSError as error:
        status = nursery.close()
        raise LaunchError(
            f"the process that a rank is forked from {how_it_ended(status)} at once: {nursery.last_words()}"
        ) from error
    return nursery


def _keep_alone(nursery: RankNursery) -> None:
    """Keep one and no other, as it holds memory."""
    for other in _idle:
        other.close()
    _idle[:] = [nursery]


def _forget() -> None:
    for nursery in list(_all):
        nursery.abandon()
    _idle.clear()


# Or a process that was forked from this one, by a library say, would keep them alive, or end them.
os.register_at_fork(after_in_child=_forget)


@atexit.register
def _close_idle() -> None:
    for nursery in _idle:
        nursery.close()
    _idle.clear()
