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
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from sparkdl.errors import LaunchError
from sparkdl.launch.guarded_process import how_it_ended
from sparkdl.launch.process_guard import reap_killed

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
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - read after its end, and closed with this object
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

    def abort(self) -> None:
        """Have it write down where it is, and end; nothing if it has ended."""
        self._process.send_signal(signal.SIGABRT)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

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
        """End it, and a rank that it has; return its exit status, that of SIGKILL where even this is not heeded."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has ended
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it imports yet, and so has forked nothing
            self._process.kill()
            status = reap_killed(self._process)
        self.connection.close()
        return status


_idle: list[RankNursery] = []
_choosing = threading.Lock()
_num_requests = [0]
"""How often a rank was wanted."""


def prepare_rank(environment: Mapping[str, str], modules: Sequence[str]) -> None:
    """Have a process import what the next rank of these variables and modules needs, unless one does already."""
    with _choosing:
        if all(nursery.key != (dict(environment), tuple(modules)) for nursery in _idle):
            _keep_alike(RankNursery(environment, modules))


def ask_nursery(
    environment: Mapping[str, str], modules: Sequence[str], request: Mapping[str, Any], fds: Sequence[int]
) -> RankNursery:
    """Send a request to an idle process that suits, or to a new one, and return who got it.

    Raises:
        LaunchError: if a new one cannot be started.
    """
    with _choosing:
        _num_requests[0] += 1
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


def give_back(nursery: RankNursery) -> None:
    """Keep a process whose rank has ended for the next one, and none of other modules, as they hold memory."""
    with _choosing:
        _keep_alike(nursery)


def end_idle_processes(timeout_s: float) -> None:
    """End what is kept for later ranks when nobody has wanted one for so long; returns at once.

    For who starts ranks in a process that may live for days. A Python worker is itself ended by Spark.
    """
    num_requests = _num_requests[0]

    def end() -> None:
        with _choosing:
            if _num_requests[0] == num_requests:
                _close_idle()

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()


def _keep_alike(nursery: RankNursery) -> None:
    """Keep a process beside those that suit the same ranks: one in a Python worker, several where ranks are local."""
    for other in _idle:
        if other.key != nursery.key:
            other.close()
    _idle[:] = [nursery, *(other for other in _idle if other.key == nursery.key)]


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
