"""A listener that hands out only connections whose peer has proved that it knows the job's secret.

Strangers cannot hold it up: each has a few seconds for its proof, only so many are heard at a time, and when
they are too many the one that has been silent longest is dropped. What they send is never parsed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING

from sparkdl.collective.addresses import listen
from sparkdl.collective.authentication import authenticate_server, check_secret
from sparkdl.collective.deadline import Deadline
from sparkdl.collective.dialing import make_prompt
from sparkdl.errors import AuthenticationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""A stranger is not dropped for another before it has had this long; an honest peer needs milliseconds."""


class AuthenticatedListener:
    """Listens on a free port; proven connections are taken by :meth:`accept`, or given to ``on_connection``.

    Listens from its construction. A context manager that closes itself. Connections that were handed out are the
    taker's to close.

    Args:
        secret: the job's secret.
        purpose: what connections are for; a peer that says otherwise is refused.
        host: address to bind; all interfaces when None.
        on_connection: called with each proven connection, from several threads.
        handshake_timeout_s: seconds that a stranger has for its proof.
        max_strangers: how many unproven connections are heard at a time; more wait in the kernel's queue.

    Attributes:
        address: where it can be reached.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        purpose: bytes = b"",
        host: str | None = None,
        on_connection: Callable[[socket.socket], None] | None = None,
        handshake_timeout_s: float = 5.0,
        max_strangers: int = 64,
    ) -> None:
        check_secret(secret)
        self._secret = secret
        self._purpose = purpose
        self._handshake_timeout_s = handshake_timeout_s
        self._max_strangers = max_strangers
        self._proven: queue.Queue[socket.socket | None] = queue.Queue()
        self._on_connection = on_connection or self._proven.put
        self._strangers: dict[socket.socket, float] = {}
        self._change = threading.Condition()
        self._closed = False
        self._sock, self.address = listen(host)
        self._thread = threading.Thread(target=self._accept_strangers, name="sparkdl-listener", daemon=True)
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
            raise TimeoutError(f"no peer came to port {self.address.port} within {timeout_s:g} s") from None
        if sock is None:
            raise ConnectionAbortedError(f"the listener on port {self.address.port} was closed")
        return sock

    def close(self) -> None:
        """Stop listening and drop every connection that was not handed out; may be called again."""
        with self._change:
            if self._closed:
                return
            self._closed = True
            for sock in self._strangers:
                _hang_up(sock)
            self._change.notify_all()
        _hang_up(self._sock)
        self._thread.join()
        self._sock.close()
        while not self._proven.empty():
            left = self._proven.get_nowait()
            if left is not None:
                left.close()
        self._proven.put(None)

    def __enter__(self) -> AuthenticatedListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept_strangers(self) -> None:
        while self._make_room():
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if self._closed:
                    return
                # Out of descriptors or a connection that was gone again: the next one may succeed.
                logger.warning("Accepting a connection on port %d failed: %s", self.address.port, error)
                with self._change:
                    self._change.wait(timeout=0.1)
                continue
            with self._change:
                self._strangers[sock] = time.monotonic()
                if self._closed:
                    _hang_up(sock)
            threading.Thread(target=self._hear, args=(sock,), name="sparkdl-handshake", daemon=True).start()

    def _make_room(self) -> bool:
        with self._change:
            while not self._closed and len(self._strangers) >= self._max_strangers:
                oldest, since = next(iter(self._strangers.items()))
                patience = Deadline(_PATIENCE_S - (time.monotonic() - since))
                if patience.expired:
                    _hang_up(oldest)
                self._change.wait(timeout=max(patience.remaining_s(), 0.01))
            return not self._closed

    def _hear(self, sock: socket.socket) -> None:
        try:
            make_prompt(sock)
            authenticate_server(
                sock, self._secret, purpose=self._purpose, timeout_s=self._handshake_timeout_s
            )
        except (AuthenticationError, OSError) as error:
            logger.warning("Rejected a connection to port %d: %s", self.address.port, error)
            self._forget(sock)
            sock.close()
            return
        self._forget(sock)
        if self._closed:
            sock.close()
        else:
            self._on_connection(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._change:
            del self._strangers[sock]
            self._change.notify_all()


def _hang_up(sock: socket.socket) -> None:
    # Unlike close(), this wakes a thread that is blocked on the socket.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
