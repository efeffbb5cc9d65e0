"""Connecting to a listener with several candidate addresses, not all of which need to work from here."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from typing import TYPE_CHECKING

from sparkdl.collective.authentication import HANDSHAKE_TIMEOUT_S, HandshakeCutError, authenticate_client
from sparkdl.collective.deadline import Deadline
from sparkdl.errors import AuthenticationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparkdl.collective.addresses import Address

_STAGGER_S = 0.25
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
"""Doubled from try to try, so that many ranks that come at once soon press less on the listener."""


def connect_any(address: Address, *, timeout_s: float) -> socket.socket:
    """Connect to whichever of the address's hosts answers first, preferring the earlier ones.

    The next host is tried as soon as one fails or has been silent for a quarter of a second (as in RFC 8305).

    Raises:
        ConnectionError: if none answers; the message lists what was tried and how each attempt failed.
    """
    failures: dict[str, str] = {}
    for _, sock in _connections(address, Deadline(timeout_s), failures):
        return sock
    raise ConnectionError(_describe(address, failures))


def connect_authenticated(
    address: Address, secret: bytes, *, purpose: bytes = b"", timeout_s: float
) -> socket.socket:
    """Connect to that host of the address where a listener proves that it knows secret and purpose.

    An address can lead elsewhere than to whoever published it: every machine has a loopback, and many have
    the same bridge address. So a host that answers but fails the proof is passed over, not taken for an
    attack.

    Raises:
        AuthenticationError: if some host answered and none of those that did proved itself.
        ConnectionError: if none answered; the message lists what was tried.
    """
    deadline = Deadline(timeout_s)
    pause_s = _FIRST_PAUSE_S
    while True:
        failures: dict[str, str] = {}
        refused = cut = False
        for host, sock in _connections(address, deadline, failures):
            handshake = deadline.at_most(HANDSHAKE_TIMEOUT_S)
            try:
                authenticate_client(sock, secret, purpose=purpose, timeout_s=handshake.timeout_s)
            except AuthenticationError as error:
                sock.close()
                failures[host] = str(error)
                cut = cut or isinstance(error, HandshakeCutError)
                refused = True
                continue
            return sock
        # A listener that many peers press on hangs up on some: those come again until their deadline, ever later.
        if not cut or deadline.remaining_s() <= pause_s:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    message = _describe(address, failures)
    raise AuthenticationError(message) if refused else ConnectionError(message)


def make_prompt(sock: socket.socket) -> None:
    """Send small messages at once, and notice within half a minute that the peer's machine is gone."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _connections(
    address: Address, deadline: Deadline, failures: dict[str, str]
) -> Iterator[tuple[str, socket.socket]]:
    """Yield hosts and connections, at most one per host; note in ``failures`` those that cannot be reached."""
    candidates = list(address.hosts)
    while candidates:
        winner = _race(candidates, address.port, deadline, failures)
        if winner is None:
            return
        candidates = [other for other in candidates if other != winner[0] and other not in failures]
        yield winner


def _race(
    hosts: list[str], port: int, deadline: Deadline, failures: dict[str, str]
) -> tuple[str, socket.socket] | None:
    waiting = list(hosts)
    with selectors.DefaultSelector() as selector:
        try:
            while (waiting or selector.get_map()) and not deadline.expired:
                if waiting:
                    _start(selector, waiting.pop(0), port, failures)
                # The last candidate has no successor to make room for and may use all the time that is left.
                patience_s = min(_STAGGER_S, deadline.remaining_s()) if waiting else deadline.remaining_s()
                for key, _ in selector.select(patience_s) if selector.get_map() else ():
                    host, sock = key.data
                    selector.unregister(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code == 0:
                        sock.setblocking(True)
                        make_prompt(sock)
                        return host, sock
                    sock.close()
                    failures[host] = os.strerror(code)
        finally:
            for key in list(selector.get_map().values()):
                host, sock = key.data
                sock.close()
        for host in hosts:
            failures.setdefault(host, f"no answer within {deadline.timeout_s:g} s")
    return None


def _start(selector: selectors.BaseSelector, host: str, port: int, failures: dict[str, str]) -> None:
    try:
        # Where the kernel has no IPv6 there is no such socket.
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        failures[host] = _reason(error)
        return
    try:
        sock.setblocking(False)
        code = sock.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        selector.register(sock, selectors.EVENT_WRITE, (host, sock))
    except OSError as error:
        sock.close()
        failures[host] = _reason(error)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _describe(address: Address, failures: dict[str, str]) -> str:
    tried = "; ".join(f"{host}: {failures.get(host, 'not tried')}" for host in address.hosts)
    return f"cannot reach port {address.port} on any of {len(address.hosts)} addresses ({tried})"
