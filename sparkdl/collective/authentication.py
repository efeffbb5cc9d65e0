"""Mutual proof that both ends of a connection know the job's secret, before anything else is read.

Runs wherever a connection is made: driver, barrier task or rank. Both ends send a fresh random nonce and
prove themselves by HMAC-SHA256 over both nonces and the purpose of the connection, each under a label of its
own, so that no proof can be replayed, reflected, or used for another purpose. All messages have a fixed size.
What follows on the connection is neither encrypted nor signed: the secret keeps strangers out, not those who
can rewrite the traffic.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

from sparkdl.collective.deadline import Deadline
from sparkdl.collective.frames import receive_exactly
from sparkdl.errors import AuthenticationError, ParamError

if TYPE_CHECKING:
    import socket

SECRET_BYTES = 32
MIN_SECRET_BYTES = 16
HANDSHAKE_TIMEOUT_S = 10.0

_MAGIC = b"sparkdl\x01"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_REFUSED = bytes(_PROOF_BYTES)
_CLIENT_LABEL = b"sparkdl client proof\x00"
_SERVER_LABEL = b"sparkdl server proof\x00"


class HandshakeCutError(AuthenticationError):
    """The connection ended in the middle of the handshake. Listeners under pressure do that: try again."""


def new_secret() -> bytes:
    """Make the secret of one job: 32 random bytes, to be kept out of logs, arguments and readable files."""
    return secrets.token_bytes(SECRET_BYTES)


def check_secret(secret: bytes) -> None:
    """Refuse a secret that could be guessed.

    Raises:
        ParamError: if it has fewer than 16 bytes.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ParamError(
            f"the job's secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed. Use new_secret()."
        )


def authenticate_client(
    sock: socket.socket, secret: bytes, *, purpose: bytes = b"", timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> None:
    """Prove to the listener behind ``sock`` that we know the secret, and demand the same of it.

    Args:
        sock: a connected stream socket; its timeout is cleared afterwards.
        secret: the job's secret.
        purpose: what the connection is for; both ends must say the same.
        timeout_s: seconds for the whole handshake.

    Raises:
        AuthenticationError: if the listener refuses us, cannot prove itself, or is too slow.
        HandshakeCutError: if it hangs up instead of answering.
    """
    check_secret(secret)
    deadline = Deadline(timeout_s)
    try:
        greeting = receive_exactly(sock, len(_MAGIC) + _NONCE_BYTES, deadline=deadline)
        if not greeting.startswith(_MAGIC):
            raise AuthenticationError(f"{_peer(sock)} is no listener of sparkdl, or of another version")
        server_nonce, client_nonce = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(client_nonce + _prove(secret, _CLIENT_LABEL, purpose, server_nonce, client_nonce))
        answer = receive_exactly(sock, _PROOF_BYTES, deadline=deadline)
    except TimeoutError as error:
        raise AuthenticationError(f"{_peer(sock)} did not prove itself within {timeout_s:g} s") from error
    except AuthenticationError:
        raise
    except OSError as error:
        raise HandshakeCutError(f"{_peer(sock)} ended the handshake: {error}") from error
    if hmac.compare_digest(answer, _REFUSED):
        raise AuthenticationError(
            f"{_peer(sock)} refused our proof: it has another secret, or listens for something else"
        )
    if not hmac.compare_digest(answer, _prove(secret, _SERVER_LABEL, purpose, server_nonce, client_nonce)):
        raise AuthenticationError(f"{_peer(sock)} does not know the job's secret")
    sock.settimeout(None)


def authenticate_server(
    sock: socket.socket, secret: bytes, *, purpose: bytes = b"", timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> None:
    """Demand of the client behind the accepted ``sock`` that it prove itself, then prove ourselves to it.

    Takes the arguments of :func:`authenticate_client`; the caller closes the socket when this raises.

    Raises:
        AuthenticationError: if the client cannot prove itself, hangs up, or is too slow.
    """
    check_secret(secret)
    deadline = Deadline(timeout_s)
    server_nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        sock.settimeout(timeout_s)
        sock.sendall(_MAGIC + server_nonce)
        answer = receive_exactly(sock, _NONCE_BYTES + _PROOF_BYTES, deadline=deadline)
        client_nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _prove(secret, _CLIENT_LABEL, purpose, server_nonce, client_nonce)):
            sock.sendall(_REFUSED)
            raise AuthenticationError(f"{_peer(sock)} does not know the job's secret")
        sock.sendall(_prove(secret, _SERVER_LABEL, purpose, server_nonce, client_nonce))
        sock.settimeout(None)
    except TimeoutError as error:
        raise AuthenticationError(f"{_peer(sock)} did not prove itself within {timeout_s:g} s") from error
    except AuthenticationError:
        raise
    except OSError as error:
        raise AuthenticationError(f"{_peer(sock)} ended the handshake: {error}") from error


def _prove(secret: bytes, label: bytes, purpose: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    # The purpose is hashed so that every part has a fixed length and no two inputs can be cut differently.
    message = label + hashlib.sha256(purpose).digest() + server_nonce + client_nonce
    return hmac.new(secret, message, hashlib.sha256).digest()


def _peer(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:
        return "the peer"
    return f"{name[0]} port {name[1]}" if isinstance(name, tuple) else "the peer"
