"""The handshake: mutual proof that both ends of a connection know the job's secret.

The proof comes before anything else is read on a connection, on drivers, barrier tasks and ranks alike. The client
speaks first: it sends a fresh random nonce with an HMAC-SHA256 over it (the *knock*). A listener checks the knock
before it stores or sends anything, so that a client without the secret costs it one read. Then both ends prove
themselves by HMAC-SHA256 over both nonces and the purpose of the connection. Each of the three codes is made under a
label of its own, so that none can be reflected or used for another purpose; the listener's fresh nonce prevents the
replay of a recorded conversation. All messages have a fixed size. Later traffic on the connection is neither encrypted
nor signed: the secret protects against strangers, but not against an attacker who can change the traffic.

========  =========================================  ===========================================
message   from the client                            from the listener
========  =========================================  ===========================================
knock     magic, client nonce, HMAC(client nonce)
greeting                                             magic, listener nonce (zeros: refused)
proof     HMAC(listener nonce, client nonce)
answer                                               HMAC(both nonces) (zeros: refused)
========  =========================================  ===========================================
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

from sparkdl.errors import AuthenticationError, ParamError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable


SECRET_BYTES = 32
MIN_SECRET_BYTES = 16

_NAME = b"sparkdl"
_VERSION = 2
_MAGIC = _NAME + bytes([_VERSION])
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_REFUSED = bytes(_PROOF_BYTES)
_KNOCK_LABEL = b"sparkdl client knock\x00"
_CLIENT_LABEL = b"sparkdl client proof\x00"
_SERVER_LABEL = b"sparkdl server proof\x00"

VERSION_NOTICE = _MAGIC + bytes(_NONCE_BYTES)
"""A listener's answer to a client that it refuses before the client has proved anything: its version, and no nonce."""


class ClientRefusedError(AuthenticationError):
    """A listener refuses a client.

    Attributes:
        answer: message that is sent to the client before the connection is closed; empty if there is none.
    """

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


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


class ClientHandshake:
    """The client's part of one handshake, without the connection that carries it.

    Attributes:
        opening: message that the client sends first.
        missing: number of bytes that are still expected from the listener, and the most that may be read; 0 when both
            ends have proved themselves.
    """

    def __init__(self, secret: bytes, purpose: bytes) -> None:
        check_secret(secret)
        self._secret, self._purpose = secret, purpose
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._server_nonce = b""
        self._received = bytearray()
        self.opening = _MAGIC + self._nonce + _prove(secret, _KNOCK_LABEL, purpose, self._nonce)
        self.missing = len(_MAGIC) + _NONCE_BYTES

    def take(self, data: bytes) -> bytes:
        """Take at most :attr:`missing` bytes from the listener, and return the bytes to send to it.

        Raises:
            AuthenticationError: if the listener refuses us or cannot prove itself; the message begins with a verb.
        """
        self._received += data
        self.missing -= len(data)
        if self.missing:
            return b""
        message = bytes(self._received)
        self._received.clear()
        if not self._server_nonce:
            return self._answer_greeting(message)
        if hmac.compare_digest(message, _REFUSED):
            raise AuthenticationError(_REFUSAL)
        nonces = self._server_nonce, self._nonce
        if not hmac.compare_digest(message, _prove(self._secret, _SERVER_LABEL, self._purpose, *nonces)):
            raise AuthenticationError("does not know the job's secret")
        return b""

    def _answer_greeting(self, greeting: bytes) -> bytes:
        if not greeting.startswith(_NAME):
            raise AuthenticationError("is not a listener of sparkdl, or runs another version of it")
        _check_version(greeting)
        if greeting == VERSION_NOTICE:
            raise AuthenticationError(_REFUSAL)
        self._server_nonce = greeting[len(_MAGIC) :]
        self.missing = _PROOF_BYTES
        return _prove(self._secret, _CLIENT_LABEL, self._purpose, self._server_nonce, self._nonce)


class ServerHandshake:
    """The listener's part of one handshake, without the connection that carries it.

    Args:
        secret: the job's secret.
        purpose: purpose of the listener's connections.
        is_new: function that returns whether a client's nonce is new; a recorded knock has an old one.

    Attributes:
        missing: number of bytes that are still expected from the client; no more may be read. 0 when both ends have
            proved themselves.
        has_knocked: whether a valid knock has arrived. It may be a replayed one.
    """

    def __init__(self, secret: bytes, purpose: bytes, is_new: Callable[[bytes], bool]) -> None:
        self._secret, self._purpose, self._is_new = secret, purpose, is_new
        self._client_nonce = self._nonce = b""
        self._received = bytearray()
        self.has_knocked = False
        self.missing = len(_MAGIC) + _NONCE_BYTES + _PROOF_BYTES

    def take(self, data: bytes) -> bytes:
        """Take at most :attr:`missing` bytes from the client, and return the bytes to send to it.

        Raises:
            ClientRefusedError: if the client cannot prove itself; the message begins with a verb.
        """
        self._received += data
        self.missing -= len(data)
        if not self.has_knocked and not self._received.startswith(_MAGIC[: len(self._received)]):
            if not self._received.startswith(_NAME[: len(self._received)]):
                raise ClientRefusedError("sent something else than a handshake of sparkdl")
            try:
                _check_version(self._received)
            except AuthenticationError as error:
                raise ClientRefusedError(str(error), VERSION_NOTICE) from None
        if self.missing:
            return b""
        message = bytes(self._received)
        self._received.clear()
        return self._check_proof(message) if self.has_knocked else self._check_knock(message)

    def _check_knock(self, knock: bytes) -> bytes:
        nonce, code = knock[len(_MAGIC) : -_PROOF_BYTES], knock[-_PROOF_BYTES:]
        if not hmac.compare_digest(code, _prove(self._secret, _KNOCK_LABEL, self._purpose, nonce)):
            raise ClientRefusedError("does not know the job's secret", VERSION_NOTICE)
        if not self._is_new(nonce):
            raise ClientRefusedError("repeated what another client had sent")
        self.has_knocked = True
        self._client_nonce, self._nonce = nonce, secrets.token_bytes(_NONCE_BYTES)
        self.missing = _PROOF_BYTES
        return _MAGIC + self._nonce

    def _check_proof(self, proof: bytes) -> bytes:
        nonces = self._nonce, self._client_nonce
        if not hmac.compare_digest(proof, _prove(self._secret, _CLIENT_LABEL, self._purpose, *nonces)):
            raise ClientRefusedError("does not know the job's secret", _REFUSED)
        return _prove(self._secret, _SERVER_LABEL, self._purpose, *nonces)


def peer_name(sock: socket.socket) -> str:
    """The address of a socket's peer, for messages."""
    try:
        name = sock.getpeername()
    except OSError:
        return "the peer"
    return f"{name[0]} port {name[1]}" if isinstance(name, tuple) else "the peer"


_REFUSAL = "refused our proof: it has another secret, or listens for something else"


def _check_version(message: bytes | bytearray) -> None:
    version = message[len(_NAME)]
    if version != _VERSION:
        raise AuthenticationError(
            f"speaks version {version} of sparkdl's handshake, and this process version {_VERSION}."
            " Install the same version of sparkdl on both sides"
        )


def _prove(secret: bytes, label: bytes, purpose: bytes, *nonces: bytes) -> bytes:
    # The purpose is hashed so that every part has a fixed length and no two inputs can be cut differently.
    message = label + hashlib.sha256(purpose).digest() + b"".join(nonces)
    return hmac.new(secret, message, hashlib.sha256).digest()
