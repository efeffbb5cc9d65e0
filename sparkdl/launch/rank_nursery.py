"""A connection to a process that ranks are forked from. Held by the Python worker that runs a barrier task."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any
from weakref import WeakSet

from sparkdl.launch.guarded_process import how_it_ended

_END_TIMEOUT_S = 2.0
"""How long the process may take to part with this one, or to be reaped once it has ended."""

_LAST_BYTES = 4096
"""How much of what it printed is told when it dies before it has forked a rank."""

_all: WeakSet[RankNursery] = WeakSet()


class RankNursery:
    """A process that ranks are forked from, as one of those who share it sees it: it has one rank at a time for each.

    Args:
        connection: to it.
        pid: its process id.
        said: the file that it prints to; None where that cannot be read.
        process: itself, where this process has started it.

    Attributes:
        pid: its process id.
    """

    def __init__(
        self,
        connection: socket.socket,
        pid: int,
        *,
        said: IO[bytes] | None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self._connection, self._said, self._process = connection, said, process
        _all.add(self)

    def ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a request, with file descriptors.

        Raises:
            OSError: if the process has ended.
        """
        socket.send_fds(self._connection, [json.dumps(request).encode()], fds)

    def hear(self) -> dict[str, Any] | None:
        """Wait for what the process tells; None when it has ended."""
        try:
            answer = self._connection.recv(1 << 16)
        except OSError:
            return None
        return json.loads(answer) if answer else None

    def abort(self) -> None:
        """Have it write down where it is, and end; nothing if it has ended."""
        self._signal(signal.SIGABRT)

    def how_it_ended(self) -> str:
        """Once :meth:`hear` has told that it has ended, how, in words."""
        if self._process is None:
            return "ended"  # only who started it is told how
        try:
            return how_it_ended(self._process.wait(_END_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return "ended"

    def last_words(self) -> str:
        """Return the end of what it has printed."""
        if self._said is None:
            return ""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _LAST_BYTES))
        return self._said.read().decode("utf-8", "replace")

    def leave(self) -> None:
        """Part with it: it ends a rank that this process has of it, and itself if nobody else shares it.

        One that does not heed this in time is killed, as it serves nobody else either.
        """
        if self._connection.fileno() < 0:
            return
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_WR)
        poller = select.poll()
        poller.register(self._connection, 0)  # the end of the connection is always told
        if not poller.poll(_END_TIMEOUT_S * 1000):
            self._signal(signal.SIGKILL)
        self._connection.close()
        if self._process is not None:
            # It may serve others for days, and is this one's to reap.
            threading.Thread(target=self._process.wait, name=f"sparkdl-reap-{self.pid}", daemon=True).start()

    def abandon(self) -> None:
        """In a fork of this process: leave it to that."""
        self._connection.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._connection.fileno() < 0:
            return
        # While the connection is there, so is the process, and its number is no other's.
        poller = select.poll()
        poller.register(self._connection, 0)
        if not poller.poll(0):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _abandon_all() -> None:
    for nursery in list(_all):
        nursery.abandon()


# Or a process that was forked from this one, by a library say, would keep them alive, or end them.
os.register_at_fork(after_in_child=_abandon_all)
