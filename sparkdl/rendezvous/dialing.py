"""Connecting to a listener with several candidate addresses. Not all of them need to work from here.

All attempts, with their handshakes, run at the same time, so that none delays the others. A listener that hangs up or
does not answer may be overloaded: it is tried again, with growing pauses, until the deadline.
"""

from __future__ import annotations

import errno
import os
import random
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from sparkdl.errors import AuthenticationError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.handshake import ClientHandshake

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.rendezvous.addresses import Address

_HANDSHAKE_TIMEOUT_S = 10.0
"""Longest time that a connected listener has for its proof."""

_STAGGER_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
"""Pause before a listener that hung up is tried again; doubled from try to try, to spread many ranks that connect at
once."""

_FIRST_PATIENCE_S, _LONGEST_PATIENCE_S = 0.5, 5.0
"""Time after which a listener that does not answer is tried again while the earlier attempt continues; doubled
likewise. A kernel whose queue of connections is full drops new ones, and TCP retries only after a second."""

_TRY_AGAIN = frozenset(
    {errno.EADDRNOTAVAIL, errno.EAGAIN, errno.ECONNABORTED, errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT}
)
"""The failures of a connection to an overloaded listener, which is tried again; other failures are final."""


def connect_authenticated(
    address: Address, secret: bytes, *, purpose: bytes = b"", timeout_s: float
) -> socket.socket:
    """Connect to the host of the address at which a listener proves that it knows the secret and the purpose.

    Earlier hosts are preferred. The next is tried as soon as one fails or has been silent for a quarter of a second (as
    in RFC 8305).

    An address can lead to another process than the one that published it: every machine has a loopback, and many have
    the same bridge address. A host that answers without the proof is therefore skipped.

    Raises:
        AuthenticationError: if hosts answered, but none of them proved itself.
        ConnectionError: if no host answered; the message lists the hosts and how the attempts failed.
    """
    candidates = [
        _Candidate(host, socket.AF_INET6 if ":" in host else socket.AF_INET, (host, address.port))
        for host in address.hosts
    ]
    return _Dialing(candidates, f"port {address.port}", (secret, purpose), timeout_s).connect()


def connect_unix(name: str, secret: bytes, *, purpose: bytes = b"", timeout_s: float) -> socket.socket:
    """Connect to an authenticated listener in the abstract namespace of Unix sockets, in the same network namespace.

    Raises:
        AuthenticationError: if the listener does not prove itself.
        ConnectionError: if there is no listener.
    """
    candidate = _Candidate("this machine", socket.AF_UNIX, f"\0{name}")
    return _Dialing([candidate], f"socket @{name}", (secret, purpose), timeout_s).connect()


GONE_S = 30.0
"""A machine that acknowledges nothing for so many seconds is gone."""

_TCP_INFO = struct.Struct("24xI28xI")
"""Fields of Linux's ``struct tcp_info``: ``tcpi_unacked``, in packets, and ``tcpi_last_ack_recv``, in milliseconds."""


def make_prompt(sock: socket.socket) -> None:
    """Make an idle socket notice within half a minute that the peer's machine is gone, and send small messages at once.

    The kernel does not probe a peer while data is on its way to it, and tries to deliver that for a quarter of an
    hour: see :func:`give_up_undelivered` and :func:`is_unheard`.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def give_up_undelivered(sock: socket.socket) -> None:
    """Make a socket also fail when data was not acknowledged for :data:`GONE_S`.

    Use this only for connections whose other end always reads: data that waits for a busy reader is given up, too.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * GONE_S))


def is_unheard(sock: socket.socket, longest_s: float = GONE_S) -> bool:
    """Whether data is on its way, and the peer's machine has acknowledged nothing for ``longest_s``.

    An idle socket is probed within shorter times. Data that waits for a peer that does not read is not on its way.

    Raises:
        OSError: if the socket is closed.
    """
    if sock.family == socket.AF_UNIX:
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    num_unacknowledged, last_heard_ms = _TCP_INFO.unpack(info)
    return bool(num_unacknowledged and last_heard_ms > 1000 * longest_s)


@dataclass(eq=False)
class _Candidate:
    """One host, and the state of the attempts to connect to it."""

    host: str
    family: int
    target: Any
    failure: str = ""
    has_answered: bool = False
    """Whether it has accepted a connection and then not proved itself."""
    due_at: float = inf
    """Time of the next attempt; infinite for never."""
    num_tries: int = 0
    num_cuts: int = 0


@dataclass(eq=False)
class _Attempt:
    """One attempt to connect to a candidate."""

    candidate: _Candidate
    sock: socket.socket
    deadline: Deadline
    handshake: ClientHandshake | None = None
    """The handshake, once the socket is connected."""


@dataclass
class _Dialing:
    """The attempts of one call; the first that succeeds is taken."""

    candidates: Sequence[_Candidate]
    where: str
    proof: tuple[bytes, bytes]
    """The secret and the purpose."""
    timeout_s: float
    attempts: set[_Attempt] = field(default_factory=set)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def connect(self) -> socket.socket:
        deadline = Deadline(self.timeout_s)
        fresh = list(self.candidates)
        next_fresh_at = time.monotonic()
        try:
            while not deadline.expired:
                now = time.monotonic()
                if fresh and (now >= next_fresh_at or not self.attempts):
                    fresh.pop(0).due_at = now
                    next_fresh_at = now + _STAGGER_S
                num_failed = self._num_failed()
                for candidate in self.candidates:
                    if candidate.due_at <= now:
                        self._start(candidate, deadline)
                if self._num_failed() == num_failed and (
                    sock := self._wait(deadline, next_fresh_at if fresh else inf)
                ):
                    return sock
                if self._num_failed() > num_failed:
                    next_fresh_at = now  # the next host need not wait for one that has failed
                if not fresh and not self.attempts and all(c.due_at == inf for c in self.candidates):
                    break
            raise self._failure()
        finally:
            for attempt in self.attempts:
                attempt.sock.close()
            self.selector.close()

    def _num_failed(self) -> int:
        return sum(bool(candidate.failure) for candidate in self.candidates)

    def _start(self, candidate: _Candidate, deadline: Deadline) -> None:
        patience_s = min(_FIRST_PATIENCE_S * 2.0**candidate.num_tries, _LONGEST_PATIENCE_S)
        candidate.num_tries += 1
        candidate.due_at = time.monotonic() + _jitter(patience_s)
        try:
            # A kernel without IPv6 cannot make such a socket.
            sock = socket.socket(candidate.family, socket.SOCK_STREAM)
        except OSError as error:
            self._note(candidate, error)
            return
        attempt = _Attempt(candidate, sock, deadline.at_most(_HANDSHAKE_TIMEOUT_S))
        self.attempts.add(attempt)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(candidate.target)
            if code == 0:
                self.selector.register(sock, selectors.EVENT_READ, attempt)
                self._greet(attempt)
            elif code == errno.EINPROGRESS:
                self.selector.register(sock, selectors.EVENT_WRITE, attempt)
            else:
                raise OSError(code, os.strerror(code))
        except OSError as error:
            self._end(attempt)
            self._note(candidate, error)

    def _wait(self, deadline: Deadline, next_fresh_at: float) -> socket.socket | None:
        """Wait until something happens or is due; return a connection that is ready."""
        next_at = min([next_fresh_at, *(candidate.due_at for candidate in self.candidates)])
        limits = [deadline.remaining_s(), *(attempt.deadline.remaining_s() for attempt in self.attempts)]
        for key, _ in self.selector.select(max(0.0, min([next_at - time.monotonic(), *limits]))):
            attempt: _Attempt = key.data
            try:
                if attempt.handshake is None:
                    self._greet(attempt)
                elif self._hear(attempt):
                    return self._take(attempt)
            except AuthenticationError as error:
                self._end(attempt)
                attempt.candidate.failure, attempt.candidate.has_answered = str(error), True
                attempt.candidate.due_at = inf
            except OSError as error:
                self._end(attempt)
                self._note(attempt.candidate, error, is_connected=attempt.handshake is not None)
        for attempt in [other for other in self.attempts if other.deadline.expired]:
            self._end(attempt)
            self._note_silence(attempt)
        return None

    def _greet(self, attempt: _Attempt) -> None:
        """Continue an attempt whose socket is connected, or has failed to connect."""
        sock = attempt.sock
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        make_prompt(sock)
        attempt.handshake = ClientHandshake(*self.proof)
        sock.send(attempt.handshake.opening)  # fits into the send buffer, which is empty
        self.selector.modify(sock, selectors.EVENT_READ, attempt)

    def _hear(self, attempt: _Attempt) -> bool:
        """Continue the handshake with what has arrived; return whether it is over."""
        sock, handshake = attempt.sock, attempt.handshake
        assert handshake is not None
        try:
            data = sock.recv(handshake.missing)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        if answer := handshake.take(data):
            sock.send(answer)
        return not handshake.missing

    def _take(self, attempt: _Attempt) -> socket.socket:
        self.selector.unregister(attempt.sock)
        self.attempts.remove(attempt)
        attempt.sock.setblocking(True)
        return attempt.sock

    def _end(self, attempt: _Attempt) -> None:
        self.attempts.remove(attempt)
        if attempt.sock in self.selector.get_map():
            self.selector.unregister(attempt.sock)
        attempt.sock.close()

    def _note(self, candidate: _Candidate, error: OSError, *, is_connected: bool = False) -> None:
        reason = error.strerror or str(error)
        candidate.failure = f"ended the handshake: {reason}" if is_connected else reason
        candidate.has_answered = candidate.has_answered or is_connected
        if error.errno not in _TRY_AGAIN:
            candidate.due_at = inf
            return
        pause_s = min(_FIRST_PAUSE_S * 2.0**candidate.num_cuts, _LONGEST_PAUSE_S)
        candidate.num_cuts += 1
        candidate.due_at = time.monotonic() + _jitter(pause_s)

    def _note_silence(self, attempt: _Attempt) -> None:
        candidate = attempt.candidate
        if attempt.handshake is None:
            candidate.failure = f"no answer within {attempt.deadline.timeout_s:.3g} s"
        else:
            candidate.failure = f"did not prove itself within {attempt.deadline.timeout_s:.3g} s"
            candidate.has_answered = True

    def _failure(self) -> Exception:
        for attempt in self.attempts:
            if not attempt.candidate.failure:
                self._note_silence(attempt)
        tried = "; ".join(
            f"{candidate.host}: {candidate.failure or 'not tried'}" for candidate in self.candidates
        )
        num = len(self.candidates)
        message = f"cannot reach {self.where} on any of {num} addresses ({tried})"
        has_answered = any(candidate.has_answered for candidate in self.candidates)
        return AuthenticationError(message) if has_answered else ConnectionError(message)


def _jitter(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.25)  # noqa: S311 - not for a secret
