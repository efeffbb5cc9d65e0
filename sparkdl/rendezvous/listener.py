"""A listener that hands out only connections whose peer has proved that it knows the job's secret.

One thread accepts connections and runs all handshakes without blocking. A peer speaks first, and its first message
proves the secret (:mod:`sparkdl.rendezvous.handshake`): a connection that sends anything else is dropped at its first
bytes. Silent connections are kept for a few seconds; when there are too many, the oldest of them are dropped, but never
one whose peer has proved itself. A flood of connections thus delays a peer only by the time that accepting them takes,
and a peer that is dropped nevertheless tries again (see :mod:`sparkdl.rendezvous.dialing`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import resource
import selectors
import socket
import struct
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from sparkdl.closing import Closing
from sparkdl.rendezvous.addresses import Address, listen
from sparkdl.rendezvous.dialing import make_prompt
from sparkdl.rendezvous.handshake import (
    VERSION_NOTICE,
    ClientRefusedError,
    ServerHandshake,
    check_secret,
    peer_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

_ACCEPTS_AT_ONCE = 256
"""How many connections are accepted before the open ones are read again."""

_MOST_STRANGERS, _LEAST_STRANGERS = 2048, 16
_LOG_EVERY_S = 60.0
_REST_S = 0.05
"""Pause in accepting connections when the process has no descriptor left and no unproven connection to drop."""

_MAX_KNOCKS = 1 << 16
"""Number of knocks that are remembered, to recognize a knock that was recorded and sent again."""

_RESET_ON_CLOSE, _AS_USUAL = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
"""Values of ``SO_LINGER``: a connection that is closed by a reset leaves nothing in the kernel."""


class AuthenticatedListener(Closing):
    """Listens on a free port; :meth:`accept` returns the proven connections, or ``on_connection`` gets them.

    Listens from its construction on. A context manager that closes itself. The code that gets a connection has to
    close it.

    Args:
        secret: the job's secret.
        purpose: purpose of the connections; a peer with another purpose is refused.
        host: address or addresses to bind; when None, those at which other machines reach this one, see
            :func:`~sparkdl.rendezvous.addresses.reachable_hosts`.
        sockets: listening sockets to use instead of ``host``; they are closed with the listener.
        on_connection: called with each proven connection from the listener's thread, which it must not block.
        handshake_timeout_s: seconds that a peer has for its proof.
        max_strangers: maximum number of connections without any proof; when None, a quarter of the descriptors that the
            process may have, and at most 2048.

    Attributes:
        address: address at which the listener can be reached; it has no hosts if ``sockets`` was given.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        purpose: bytes = b"",
        host: str | Sequence[str] | None = None,
        sockets: Sequence[socket.socket] | None = None,
        on_connection: Callable[[socket.socket], None] | None = None,
        handshake_timeout_s: float = 5.0,
        max_strangers: int | None = None,
    ) -> None:
        check_secret(secret)
        self._secret = secret
        self._purpose = purpose
        self._handshake_timeout_s = handshake_timeout_s
        self._max_strangers = strangers_allowed() if max_strangers is None else max_strangers
        self._proven: queue.Queue[socket.socket | None] = queue.Queue()
        self._on_connection = on_connection or self._proven.put
        # Both by age, the oldest first.
        self._strangers: OrderedDict[_Stranger, None] = OrderedDict()
        self._knocked: OrderedDict[_Stranger, None] = OrderedDict()
        self._knocks: OrderedDict[bytes, None] = OrderedDict()
        self._closed = threading.Event()
        self._closing = threading.Lock()
        if sockets is None:
            self._sockets, self.address = listen(host)
        else:
            self._sockets, self.address = list(sockets), Address(hosts=(), port=0)
        self._where = f"port {self.address.port}" if self.address.hosts else "a socket of this machine"
        self._refused_at: float | None = None
        """When refused connections were last logged; None before the first."""
        self._num_unlogged, self._last_refusal = 0, ""
        self._complained_at = -_LOG_EVERY_S
        self._selector = selectors.DefaultSelector()
        for sock in self._sockets:
            sock.setblocking(False)
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
            )  # inherited by the accepted connections
            self._selector.register(sock, selectors.EVENT_READ, sock)
        self._thread = threading.Thread(target=self._serve, name="sparkdl-listener", daemon=True)
        self._thread.start()

    def accept(self, *, timeout_s: float) -> socket.socket:
        """Take the next proven connection.

        Raises:
            TimeoutError: if no peer proves itself in time.
            ConnectionError: if the listener is closed meanwhile.
        """
        try:
            sock = self._proven.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no peer came to {self._where} within {timeout_s:g} s") from None
        if sock is None:
            raise ConnectionAbortedError(f"the listener on {self._where} was closed")
        return sock

    def close(self) -> None:
        """Stop listening and drop every connection that was not handed out; may be called again."""
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # unlike close(), this wakes the thread
        self._thread.join()
        while not self._proven.empty():
            left = self._proven.get_nowait()
            if left is not None:
                left.close()
        self._proven.put(None)

    def _serve(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(self._time_to_next_s()):
                if isinstance(key.data, _Stranger):
                    if key.data in self._strangers or key.data in self._knocked:  # not dropped meanwhile
                        self._hear(key.data)
                else:
                    self._accept_from(key.data)
            self._drop_overdue()
            if (due_at := self._refusals_due_at()) is not None and due_at <= time.monotonic():
                self._log_refusals()
        for sock in self._sockets:
            sock.close()
        for stranger in [*self._strangers, *self._knocked]:
            stranger.sock.close()
        self._selector.close()
        self._log_refusals()

    def _time_to_next_s(self) -> float | None:
        times = [next(iter(strangers)).due_at for strangers in (self._strangers, self._knocked) if strangers]
        if (due_at := self._refusals_due_at()) is not None:
            times.append(due_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept_from(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the peer has already closed the connection
                continue
            except OSError as error:
                if not self._closed.is_set():
                    self._make_do(error)
                return
            stranger = _Stranger(sock, ServerHandshake(self._secret, self._purpose, self._is_new_knock))
            stranger.due_at = time.monotonic() + self._handshake_timeout_s
            self._strangers[stranger] = None
            self._hear(stranger)  # an honest peer has sent something by now
            if stranger in self._strangers or stranger in self._knocked:
                self._selector.register(sock, selectors.EVENT_READ, stranger)
                stranger.is_registered = True
            if len(self._strangers) > self._max_strangers:
                self._evict()

    def _make_do(self, error: OSError) -> None:
        """Continue without descriptors or memory for another connection."""
        now = time.monotonic()
        if now - self._complained_at >= _LOG_EVERY_S:
            self._complained_at = now
            logger.warning("Accepting a connection on %s failed: %s", self._where, error)
        for _ in range(max(1, len(self._strangers) // 2)):
            if not self._strangers:
                self._closed.wait(_REST_S)
                return
            self._evict()

    def _evict(self) -> None:
        """Drop the oldest stranger, unless it has sent a proof that was not read yet."""
        oldest = next(iter(self._strangers))
        self._hear(oldest)
        if oldest in self._strangers:
            self._drop(oldest, "had sent no proof when newer connections needed its place")

    def _hear(self, stranger: _Stranger) -> None:
        handshake, sock = stranger.handshake, stranger.sock
        try:
            while handshake.missing:
                data = sock.recv(handshake.missing, socket.MSG_DONTWAIT)
                if not data:
                    self._drop(stranger, "ended the handshake")
                    return
                if answer := handshake.take(data):
                    # The answer fits into the connection's send buffer, which is empty.
                    sock.send(answer, socket.MSG_DONTWAIT)
                if handshake.has_knocked and stranger in self._strangers:
                    del self._strangers[stranger]
                    stranger.due_at = time.monotonic() + self._handshake_timeout_s
                    self._knocked[stranger] = None
        except (BlockingIOError, InterruptedError):
            return
        except ClientRefusedError as error:
            self._drop(stranger, str(error), error.answer)
        except OSError as error:
            self._drop(stranger, f"ended the handshake: {error}")
        else:
            self._hand_out(stranger)

    def _hand_out(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        sock = stranger.sock
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AS_USUAL)
            make_prompt(sock)
            if self._closed.is_set():
                raise ConnectionAbortedError("the listener was closed")
            self._on_connection(sock)
        except Exception as error:
            # A connection that cannot be served, because no thread can be started for it, must not end the listener.
            sock.close()
            if not self._closed.is_set():
                logger.warning("Could not serve a connection to %s: %s", self._where, error)

    def _is_new_knock(self, nonce: bytes) -> bool:
        if nonce in self._knocks:
            return False
        self._knocks[nonce] = None
        if len(self._knocks) > _MAX_KNOCKS:
            self._knocks.popitem(last=False)
        return True

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for strangers in (self._strangers, self._knocked):
            while strangers and (oldest := next(iter(strangers))).due_at <= now:
                self._hear(oldest)  # this thread may have been late rather than the peer
                if oldest in strangers:
                    words = f"did not prove itself within {self._handshake_timeout_s:g} s"
                    self._drop(oldest, words, VERSION_NOTICE if strangers is self._strangers else b"")

    def _drop(self, stranger: _Stranger, reason: str, answer: bytes = b"") -> None:
        sock = stranger.sock
        if stranger in self._knocked:
            # The peer tried twice because the first answer came late, and needs only one connection.
            logger.debug("A peer that has the secret %s on %s", reason, self._where)
        else:
            self._note_refusal(sock, reason)
        self._forget(stranger)
        with contextlib.suppress(OSError):
            if answer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AS_USUAL)
                sock.send(answer, socket.MSG_DONTWAIT)
                # If input were left unread, the kernel would drop the answer.
                sock.recv(1 << 16, socket.MSG_DONTWAIT)
        sock.close()

    def _note_refusal(self, sock: socket.socket, reason: str) -> None:
        """Log the first refused connection at once, and later ones by their number, at most once a minute."""
        if self._refused_at is None:
            self._refused_at = time.monotonic()
            logger.warning("Rejected a connection to %s: %s %s", self._where, peer_name(sock), reason)
            return
        self._num_unlogged += 1
        self._last_refusal = f"{peer_name(sock)} {reason}"

    def _refusals_due_at(self) -> float | None:
        """When the number of refused connections is to be logged; None if all have been."""
        return (
            self._refused_at + _LOG_EVERY_S if self._refused_at is not None and self._num_unlogged else None
        )

    def _log_refusals(self) -> None:
        if self._refused_at is not None and self._num_unlogged:
            now = time.monotonic()
            logger.warning(
                "Rejected %d more connections to %s in %.0f s; the last of them: %s",
                *(self._num_unlogged, self._where, now - self._refused_at, self._last_refusal),
            )
            self._num_unlogged, self._refused_at = 0, now

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger, None)
        self._knocked.pop(stranger, None)
        if stranger.is_registered:
            self._selector.unregister(stranger.sock)


class _Stranger:
    """A connection whose peer has not proved itself yet."""

    __slots__ = ("due_at", "handshake", "is_registered", "sock")

    def __init__(self, sock: socket.socket, handshake: ServerHandshake) -> None:
        self.sock, self.handshake = sock, handshake
        self.due_at = 0.0
        self.is_registered = False


def strangers_allowed() -> int:
    """Number of connections without any proof that a listener keeps, from the process's limit of descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_STRANGERS
    return min(_MOST_STRANGERS, max(_LEAST_STRANGERS, soft // 4))
