"""Connections between the Python workers of an executor and their forkserver, at both ends.

The workers of one executor share the forkserver. Each worker holds a :class:`ForkserverConnection`; the forkserver
holds a :class:`ForkserverClient` for each connection, and runs as long as any worker is connected, no matter which
worker started it.
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

from sparkdl.launch.forkserver.guard import describe_exit
from sparkdl.launch.rank.stacks import STACK_SIGNAL, await_dump

END_TIMEOUT_S = 2.0
"""How long the forkserver may take to close a connection, or to be reaped once it has ended."""

_LAST_BYTES = 4096
"""How much of the forkserver's output is reported if it dies before it has forked a rank."""

_all: WeakSet[ForkserverConnection] = WeakSet()


class ForkserverConnection:
    """A worker's connection to the forkserver, which forks one rank at a time for each connection.

    Args:
        connection: socket of the connection.
        pid: process id of the forkserver.
        output: file that the forkserver prints to, opened for this connection alone; None if it cannot be read. Every
            connection holds a shared lock on it (flock(2)), so that a connection finds out whether it is the last one.
        process: process of the forkserver if this process has started it; otherwise None.

    Attributes:
        pid: process id of the forkserver.
    """

    def __init__(
        self,
        connection: socket.socket,
        pid: int,
        *,
        output: IO[bytes] | None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self._connection, self._output, self._process = connection, output, process
        self._lock = threading.RLock()
        if output is not None:
            with suppress(BlockingIOError):  # the last connection is killing the forkserver
                fcntl.flock(output, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _all.add(self)

    def send(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a request, with file descriptors.

        Raises:
            OSError: if the forkserver has ended.
        """
        socket.send_fds(self._connection, [json.dumps(request).encode()], fds)

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None when the forkserver has ended."""
        try:
            message = self._connection.recv(1 << 16)
        except OSError:
            return None
        return json.loads(message) if message else None

    def dump_stacks(self) -> str:
        """Make the forkserver print the stacks of its threads, which does not end it; return its last output."""
        if self._output is None:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        if self._signal(STACK_SIGNAL):
            await_dump(self._output.fileno(), size)
        return self.last_output()

    def describe_exit(self) -> str:
        """How the forkserver ended, in words, once :meth:`receive` has returned None."""
        if self._process is None:
            # Only its parent gets the exit status. A crash at least prints something, by faulthandler.
            return "ended" if self.last_output() else "ended without output (out of memory?)"
        try:
            return describe_exit(self._process.wait(END_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return "ended"

    def last_output(self) -> str:
        """Return the end of what the forkserver has printed."""
        if self._output is None:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(
            "utf-8", "replace"
        )

    def disconnect(self) -> None:
        """Close the connection; the forkserver then ends this worker's rank, and exits with the last connection.

        If the forkserver does not respond in time, because it is stopped or imports a library that holds the
        interpreter, the last worker to disconnect kills it. Until then other workers may still use it.
        """
        with self._lock:
            if self._connection.fileno() < 0:
                return
            with suppress(OSError):  # it has ended
                self._connection.shutdown(socket.SHUT_WR)
            poller = select.poll()
            poller.register(self._connection, 0)  # a closed connection is always reported
            if not poller.poll(END_TIMEOUT_S * 1000) and self._is_last():
                self._signal(signal.SIGKILL)
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
            self._connection.close()
            if self._output is not None:
                fcntl.flock(self._output, fcntl.LOCK_UN)
        if self._process is not None:
            # It may serve other workers for days; its parent has to reap it.
            reaping = threading.Thread(
                target=self._process.wait, name=f"sparkdl-reap-{self.pid}", daemon=True
            )
            with suppress(RuntimeError):  # while the interpreter exits, since Python 3.12
                reaping.start()

    def _is_last(self) -> bool:
        if self._output is None:
            return False
        try:
            # If another connection holds a lock, this releases our own: of two connections that close at the same time,
            # the second is the last.
            fcntl.flock(self._output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _signal(self, number: int) -> bool:
        """Send the forkserver a signal; return whether it was running."""
        with self._lock:
            if self._connection.fileno() < 0:
                return False
            # While the connection is open the forkserver runs, and no other process has its process id.
            poller = select.poll()
            poller.register(self._connection, 0)
            if poller.poll(0):
                return False
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
        return True


def _close_all_in_fork() -> None:
    """In a fork of this process, close the inherited sockets."""
    for connection in list(_all):
        connection._connection.close()


# Otherwise a fork of this process, made by a library for example, would keep the forkservers running, or end them.
os.register_at_fork(after_in_child=_close_all_in_fork)


_BACKLOG = 1024
"""More than the slots of a host: no connection is accepted while an import holds the interpreter."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the peer, as ``SO_PEERCRED`` returns them (unix(7))."""


def peer_process(connection: socket.socket) -> int | None:
    """Process id of the peer of a Unix socket; None if it is another user's, or in another PID namespace."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    # A process in another PID namespace has process id 0.
    return process if process > 0 and user == os.geteuid() else None


@dataclass(eq=False)
class ForkserverClient:
    """A worker that may request ranks, one at a time.

    Attributes:
        connection: connection to the worker.
        rank: process id of the worker's rank; 0 if it has none.
        is_exit_reported: whether the exit of the rank was reported to the worker.
    """

    connection: socket.socket
    rank: int = 0
    is_exit_reported: bool = False


class ForkserverClients:
    """All connected workers.

    Args:
        first: connection to the worker that started this process.
        listener: bound socket through which other workers connect; None if they cannot.
    """

    def __init__(self, first: socket.socket, listener: socket.socket | None) -> None:
        self._clients = [ForkserverClient(first)]
        self._listener = listener
        if listener is not None:
            listener.setblocking(False)
            listener.listen(_BACKLOG)

    def __iter__(self) -> Iterator[ForkserverClient]:
        return iter(list(self._clients))

    def poll(
        self, events: int, *, wakeup_fd: int | None = None, timeout_ms: int | None = None
    ) -> list[ForkserverClient]:
        """Wait for an event on a connection, a new connection, or ``wakeup_fd`` to be readable.

        Args:
            events: event mask of :func:`select.poll` for the connections.
            wakeup_fd: another descriptor to wait for.
            timeout_ms: milliseconds to wait; for ever when None.

        Returns:
            The clients with an event.
        """
        poller = select.poll()  # takes descriptors of any number
        for client in self._clients:
            poller.register(client.connection, events)
        for other in (self._listener, wakeup_fd):
            if other is not None:
                poller.register(other, select.POLLIN)
        ready = {number for number, _ in poller.poll(timeout_ms)}
        clients = [client for client in self._clients if client.connection.fileno() in ready]
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept()
        return clients

    def drop(self, client: ForkserverClient) -> None:
        """Close the connection of a client."""
        client.connection.close()
        self._clients.remove(client)

    def all_left(self) -> bool:
        """Whether no client is left; once this is true, no client can connect any more."""
        if self._clients:
            return False
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # refuses new connections at once,
            self._accept()  # and those that were already waiting are accepted
            self._listener.close()
            self._listener = None
        return not self._clients

    def close_in_rank(self) -> None:
        """In a forked rank, close the inherited sockets."""
        for client in self._clients:
            client.connection.close()
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_BACKLOG + 1):  # not for ever, even if other users' processes keep connecting
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no connection is waiting
                return
            if peer_process(connection) is None:
                connection.close()
            else:
                connection.setblocking(True)
                self._clients.append(ForkserverClient(connection))
