from __future__ import annotations

import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from sparkdl.collective import (
    AuthenticatedListener,
    Coordinator,
    authenticate_client,
    authenticate_server,
    connect_any,
    new_secret,
)
from sparkdl.errors import AuthenticationError, ParamError
from sparkdl.rendezvous.handshake import ClientHandshake, HandshakeCutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = new_secret()

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def at_the_same_time(left: Callable[[], None], right: Callable[[], None]) -> list[BaseException | None]:
    """Run both ends in threads; return the exception of each."""
    with ThreadPoolExecutor() as pool:
        return [end.exception() for end in [pool.submit(left), pool.submit(right)]]


def shake_hands(
    pair: Pair,
    *,
    client_secret: bytes = SECRET,
    server_secret: bytes = SECRET,
    client_purpose: bytes = b"test",
) -> list[BaseException | None]:
    client, server = pair
    return at_the_same_time(
        lambda: authenticate_client(client, client_secret, purpose=client_purpose, timeout_s=5.0),
        lambda: authenticate_server(server, server_secret, purpose=b"test", timeout_s=5.0),
    )


def test_secret_is_new_each_time() -> None:
    assert len(new_secret()) == 32
    assert new_secret() != new_secret()


@pytest.mark.parametrize("secret", [b"", b"password"])
def test_secret_that_could_be_guessed_is_refused(secret: bytes) -> None:
    with pytest.raises(ParamError, match="at least 16"):
        Coordinator(secret=secret, world_size=1)


def test_same_secret_and_purpose_are_accepted_and_leave_no_bytes_behind(pair: Pair) -> None:
    assert shake_hands(pair) == [None, None]
    client, server = pair
    client.sendall(b"first")
    server.sendall(b"second")
    assert server.recv(100) == b"first"
    assert client.recv(100) == b"second"


def test_other_secret_is_refused_on_both_ends(pair: Pair) -> None:
    client, server = shake_hands(pair, client_secret=new_secret())
    assert "does not know the job's secret" in str(server)
    assert "refused our proof" in str(client)


def test_other_purpose_is_refused(pair: Pair) -> None:
    client, server = shake_hands(pair, client_purpose=b"something else")
    assert isinstance(client, AuthenticationError)
    assert isinstance(server, AuthenticationError)


def test_client_refuses_a_server_that_reflects_its_proof(pair: Pair) -> None:
    client, server = pair

    def reflect() -> None:
        server.recv(72, socket.MSG_WAITALL)
        server.sendall(b"sparkdl\x02" + secrets.token_bytes(32))
        server.sendall(server.recv(32, socket.MSG_WAITALL))

    raised, _ = at_the_same_time(lambda: authenticate_client(client, SECRET, timeout_s=5.0), reflect)
    assert "does not know the job's secret" in str(raised)


def record(pair: Pair) -> bytes:
    """The bytes that a client sends to a listener whose messages look valid."""
    client, server = pair
    recorded: list[bytes] = []

    def listen_in() -> None:
        recorded.append(server.recv(72, socket.MSG_WAITALL))
        server.sendall(b"sparkdl\x02" + secrets.token_bytes(32))
        recorded.append(server.recv(32, socket.MSG_WAITALL))
        server.close()

    at_the_same_time(lambda: authenticate_client(client, SECRET, timeout_s=5.0), listen_in)
    assert [len(message) for message in recorded] == [72, 32]
    return b"".join(recorded)


def test_server_refuses_a_proof_that_was_recorded_before(pair: Pair) -> None:
    recorded = record(pair)
    replaying, attacked = socket.socketpair()
    with replaying, attacked:
        _, raised = at_the_same_time(
            lambda: replaying.sendall(recorded), lambda: authenticate_server(attacked, SECRET, timeout_s=5.0)
        )
    assert "does not know the job's secret" in str(raised)


def test_listener_refuses_a_knock_that_it_has_heard_before() -> None:
    with AuthenticatedListener(SECRET, host="127.0.0.1") as listener:
        knock = ClientHandshake(SECRET, b"").opening
        with connect_any(listener.address, timeout_s=5.0) as first:
            first.sendall(knock)
            assert first.recv(100).startswith(b"sparkdl")
            with connect_any(listener.address, timeout_s=5.0) as second:
                second.settimeout(10.0)
                second.sendall(knock)
                with pytest.raises(ConnectionResetError):
                    second.recv(100)


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (b"sparkdl\x01", "version 1 of sparkdl's handshake.*version 2"),
        (b"sparkdl\x03", "version 3 of sparkdl's handshake.*version 2"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "not a listener of sparkdl"),
    ],
)
def test_client_names_the_other_version_or_program_that_greets_it(
    pair: Pair, greeting: bytes, message: str
) -> None:
    client, server = pair
    server.sendall(greeting + secrets.token_bytes(50))
    with pytest.raises(AuthenticationError, match=message):
        authenticate_client(client, SECRET, timeout_s=5.0)


def test_client_of_another_version_is_named_and_receives_the_version_of_the_listener(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"sparkdl\x03" + secrets.token_bytes(10))
    with pytest.raises(AuthenticationError, match="version 3 of sparkdl's handshake.*version 2"):
        authenticate_server(server, SECRET, timeout_s=5.0)
    assert client.recv(100).startswith(b"sparkdl\x02")


def test_client_of_the_first_version_receives_the_version_of_the_listener() -> None:
    with (
        AuthenticatedListener(SECRET, host="127.0.0.1", handshake_timeout_s=0.1) as listener,
        connect_any(listener.address, timeout_s=5.0) as client,
    ):
        client.settimeout(10.0)
        assert client.recv(40, socket.MSG_WAITALL) == b"sparkdl\x02" + bytes(32)


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 1000, b"\x80\x04\x95"])
def test_server_refuses_garbage(pair: Pair, garbage: bytes) -> None:
    client, server = pair
    client.sendall(garbage)
    client.shutdown(socket.SHUT_WR)
    with pytest.raises(AuthenticationError):
        authenticate_server(server, SECRET, timeout_s=5.0)


def test_server_gives_a_dripping_client_one_deadline_for_all_bytes(pair: Pair) -> None:
    client, server = pair
    over = threading.Event()

    def drip() -> None:
        for byte in b"sparkdl\x02" + bytes(1000):
            client.sendall(bytes([byte]))
            if over.wait(0.02):
                break

    def hear() -> None:
        try:
            authenticate_server(server, SECRET, timeout_s=0.3)
        finally:
            over.set()

    _, raised = at_the_same_time(drip, hear)
    assert "within 0.3 s" in str(raised)


def test_client_does_not_wait_for_a_silent_server_for_ever(pair: Pair) -> None:
    with pytest.raises(AuthenticationError, match=r"within 0\.1 s"):
        authenticate_client(pair[0], SECRET, timeout_s=0.1)


def test_client_says_that_it_was_cut_off(pair: Pair) -> None:
    client, server = pair
    server.close()
    with pytest.raises(HandshakeCutError):
        authenticate_client(client, SECRET, timeout_s=5.0)
