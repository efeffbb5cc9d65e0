"""Who may want ranks of the process that these are forked from: Python workers of one executor, each by a connection.

Runs in that process. It stays as long as one of them does, whichever of them started it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

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
