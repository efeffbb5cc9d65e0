"""The connections of a barrier task's Python worker to a process that ranks are forked from, from both ends.

The Python workers of one executor share the process. Each holds a :class:`RankNursery`, its own connection to the
process; the process itself holds a :class:`NurseryClient` for each connection. The process runs as long as at least
one of them is connected, no matter which of them started it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any
from weakref import WeakSet

from sparkdl.launch.forkserver.guard import how_it_ended
from sparkdl.launch.rank.pulse import STACK_SIGNAL, await_dump

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
        said: the file that it prints to, opened for this connection alone; None where that cannot be read. Who shares
            the process holds a lock on it (flock(2)), which is how the last one knows that it is.
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
        self._parting = threading.RLock()
        if said is not None:
            with suppress(BlockingIOError):  # the last one is killing it
                fcntl.flock(said, fcntl.LOCK_SH | fcntl.LOCK_NB)
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

    def where(self) -> str:
        """Have it write down where it is, which does not end it, and return the end of what it has printed."""
        if self._said is None:
            return ""
        size = os.fstat(self._said.fileno()).st_size
        if self._signal(STACK_SIGNAL):
            await_dump(self._said.fileno(), size)
        return self.last_words()

    def how_it_ended(self) -> str:
        """Once :meth:`hear` has told that it has ended, how, in words."""
        if self._process is None:
            # Only who started it is told how. What dies by its own fault says so, by faulthandler at least.
            return "ended" if self.last_words() else "ended without a word (out of memory?)"
        try:
            return how_it_ended(self._process.wait(_END_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return "ended"

    def last_words(self) -> str:
        """Return the end of what it has printed."""
        if self._said is None:
            return ""
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(
            "utf-8", "replace"
        )

    def leave(self) -> None:
        """Part with it: it ends a rank that this process has of it, and itself if nobody else shares it.

        One that does not heed this in time, as it is stopped or imports a library that holds the interpreter, is killed
        by the last one who parts with it. To the others it may still be of use.
        """
        with self._parting:
            if self._connection.fileno() < 0:
                return
            with suppress(OSError):  # it has ended
                self._connection.shutdown(socket.SHUT_WR)
            poller = select.poll()
            poller.register(self._connection, 0)  # the end of the connection is always told
            if not poller.poll(_END_TIMEOUT_S * 1000) and self._is_last():
                self._signal(signal.SIGKILL)
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # a thread that hears hears the end
            self._connection.close()
            if self._said is not None:
                fcntl.flock(self._said, fcntl.LOCK_UN)
        if self._process is not None:
            # It may serve others for days, and is this one's to reap.
            reaping = threading.Thread(
                target=self._process.wait, name=f"sparkdl-reap-{self.pid}", daemon=True
            )
            with suppress(RuntimeError):  # at the end of the interpreter, since Python 3.12
                reaping.start()

    def abandon(self) -> None:
        """In a fork of this process: leave it to that."""
        self._connection.close()

    def _is_last(self) -> bool:
        if self._said is None:
            return False
        try:
            # Where another one has a lock, this gives ours up: of two who part at the same time the second is the last.
            fcntl.flock(self._said, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _signal(self, number: int) -> bool:
        """Send it a signal; return whether it was there."""
        with self._parting:
            if self._connection.fileno() < 0:
                return False
            # While the connection is there, so is the process, and its number is no other's.
            poller = select.poll()
            poller.register(self._connection, 0)
            if poller.poll(0):
                return False
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
        return True


def _abandon_all() -> None:
    for nursery in list(_all):
        nursery.abandon()


# Or a process that was forked from this one, by a library say, would keep them alive, or end them.
os.register_at_fork(after_in_child=_abandon_all)


_BACKLOG = 1024
"""More than there are slots on a host: nobody is let in while something holds the interpreter as it is imported."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of who connected or listened, as ``SO_PEERCRED`` gives them (unix(7))."""


def peer_process(connection: socket.socket) -> int | None:
    """The process at the other end of a Unix socket: who connected, or who listened; None if it is not this user's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    # A process that is not to be seen from here has number 0.
    return process if process > 0 and user == os.geteuid() else None


@dataclass(eq=False)
class NurseryClient:
    """One who may want ranks, one at a time.

    Attributes:
        connection: to it.
        rank: process id of the rank that it has; 0 if it has none.
        exit_told: whether it knows that this has ended.
    """

    connection: socket.socket
    rank: int = 0
    exit_told: bool = False


class NurseryClients:
    """All who may want ranks.

    Args:
        first: connection to who started this process.
        door: a bound socket by which others connect; None if nobody may.
    """

    def __init__(self, first: socket.socket, door: socket.socket | None) -> None:
        self._clients = [NurseryClient(first)]
        self._door = door
        if door is not None:
            door.setblocking(False)
            door.listen(_BACKLOG)

    def __iter__(self) -> Iterator[NurseryClient]:
        return iter(list(self._clients))

    def await_any(
        self, events: int, *, woken: int | None = None, timeout_ms: int | None = None
    ) -> list[NurseryClient]:
        """Wait until something happens to one of them or until ``woken`` can be read; let in who knocks.

        Args:
            events: of :func:`select.poll`, that concern them.
            woken: another descriptor to wait for.
            timeout_ms: how long to wait; for ever when None.

        Returns:
            Those to whom something happened.
        """
        poller = select.poll()  # which takes descriptors of any number
        for client in self._clients:
            poller.register(client.connection, events)
        for other in (self._door, woken):
            if other is not None:
                poller.register(other, select.POLLIN)
        ready = {number for number, _ in poller.poll(timeout_ms)}
        happened = [client for client in self._clients if client.connection.fileno() in ready]
        if self._door is not None and self._door.fileno() in ready:
            self._let_in()
        return happened

    def drop(self, client: NurseryClient) -> None:
        """Part with one of them."""
        client.connection.close()
        self._clients.remove(client)

    def are_gone(self) -> bool:
        """Whether nobody is there; then nobody is let in any more either."""
        if self._clients:
            return False
        if self._door is not None:
            self._door.shutdown(socket.SHUT_RDWR)  # who knocks from now on is refused at once,
            self._let_in()  # and who has knocked before is not left outside
            self._door.close()
            self._door = None
        return not self._clients

    def forget(self) -> None:
        """In a rank: leave them to the process that it was forked from."""
        for client in self._clients:
            client.connection.close()
        if self._door is not None:
            self._door.close()

    def _let_in(self) -> None:
        assert self._door is not None
        for _ in range(_BACKLOG + 1):  # and not for ever, should strangers knock all the time
            try:
                connection, _ = self._door.accept()
            except OSError:  # nobody knocks
                return
            if peer_process(connection) is None:
                connection.close()
            else:
                connection.setblocking(True)
                self._clients.append(NurseryClient(connection))
