from __future__ import annotations

import secrets
import socket

import pytest

from sparkdl.collective import AuthenticatedListener, Coordinator, connect_authenticated, new_secret
from sparkdl.errors import AuthenticationError, ParamError
from sparkdl.rendezvous.handshake import VERSION_NOTICE, ClientHandshake, ClientRefusedError, ServerHandshake

SECRET = new_secret()
KNOCK_BYTES, PROOF_BYTES = 72, 32
GREETING = b"sparkdl\x02"


def new_server() -> ServerHandshake:
    return ServerHandshake(SECRET, b"test", lambda _: True)


def test_secret_is_new_each_time() -> None:
    assert len(new_secret()) == 32
    assert new_secret() != new_secret()


@pytest.mark.parametrize("secret", [b"", b"password"])
def test_secret_that_could_be_guessed_is_refused(secret: bytes) -> None:
    with pytest.raises(ParamError, match="at least 16"):
        Coordinator(secret=secret, world_size=1)
    with pytest.raises(ParamError, match="at least 16"):
        ClientHandshake(secret, b"test")


@pytest.mark.parametrize("size", [1, 30, 100])
def test_same_secret_and_purpose_are_proved_on_both_ends_in_pieces_of_any_size(size: int) -> None:
    client, server = ClientHandshake(SECRET, b"test"), new_server()
    message = client.opening
    for end in (server, client, server, client):
        pieces = [message[start : start + size] for start in range(0, len(message), size)]
        message = b"".join(end.take(piece) for piece in pieces)
    assert message == b""
    assert client.missing == server.missing == 0


def test_proven_connection_has_no_bytes_of_the_handshake_left() -> None:
    with (
        AuthenticatedListener(SECRET, purpose=b"test", host="127.0.0.1") as listener,
        connect_authenticated(listener.address, SECRET, purpose=b"test", timeout_s=10.0) as client,
        listener.accept(timeout_s=10.0) as server,
    ):
        client.sendall(b"first")
        server.sendall(b"second")
        assert server.recv(100) == b"first"
        assert client.recv(100) == b"second"


@pytest.mark.parametrize(
    ("secret", "purpose"), [(new_secret(), b"test"), (SECRET, b"something else")], ids=["secret", "purpose"]
)
def test_other_secret_and_other_purpose_are_refused_on_both_ends(secret: bytes, purpose: bytes) -> None:
    client = ClientHandshake(secret, purpose)
    with pytest.raises(ClientRefusedError, match="does not know the job's secret") as refused:
        new_server().take(client.opening)
    with pytest.raises(AuthenticationError, match="refused our proof"):
        client.take(refused.value.answer)


def test_client_that_knocks_rightly_and_proves_wrongly_is_refused_on_both_ends() -> None:
    client, server = ClientHandshake(SECRET, b"test"), new_server()
    client.take(server.take(client.opening))
    with pytest.raises(ClientRefusedError, match="does not know the job's secret") as refused:
        server.take(bytes(PROOF_BYTES))
    with pytest.raises(AuthenticationError, match="refused our proof"):
        client.take(refused.value.answer)


def test_client_refuses_a_server_that_reflects_its_proof() -> None:
    client = ClientHandshake(SECRET, b"test")
    proof = client.take(GREETING + secrets.token_bytes(32))
    with pytest.raises(AuthenticationError, match="does not know the job's secret"):
        client.take(proof)


def test_server_refuses_a_proof_that_was_recorded_before() -> None:
    recorded = ClientHandshake(SECRET, b"test")
    proof = recorded.take(GREETING + secrets.token_bytes(32))
    assert (len(recorded.opening), len(proof)) == (KNOCK_BYTES, PROOF_BYTES)
    server = new_server()
    server.take(recorded.opening)
    with pytest.raises(ClientRefusedError, match="does not know the job's secret"):
        server.take(proof)


def test_listener_refuses_a_knock_that_it_has_heard_before() -> None:
    with AuthenticatedListener(SECRET, host="127.0.0.1") as listener:
        knock = ClientHandshake(SECRET, b"").opening
        there = "127.0.0.1", listener.address.port
        with socket.create_connection(there, 10.0) as first, socket.create_connection(there, 10.0) as second:
            first.sendall(knock)
            assert first.recv(100).startswith(GREETING)
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
def test_client_names_the_other_version_or_program_that_greets_it(greeting: bytes, message: str) -> None:
    client = ClientHandshake(SECRET, b"test")
    with pytest.raises(AuthenticationError, match=message):
        client.take((greeting + secrets.token_bytes(50))[: client.missing])


def test_client_of_another_version_is_named_and_receives_the_version_of_the_listener() -> None:
    with pytest.raises(ClientRefusedError, match="version 3 of sparkdl's handshake.*version 2") as refused:
        new_server().take(b"sparkdl\x03" + secrets.token_bytes(10))
    assert refused.value.answer == VERSION_NOTICE
    assert VERSION_NOTICE.startswith(GREETING)


def test_client_of_the_first_version_receives_the_version_of_the_listener() -> None:
    with (
        AuthenticatedListener(SECRET, host="127.0.0.1", handshake_timeout_s=0.1) as listener,
        socket.create_connection(("127.0.0.1", listener.address.port), 10.0) as client,
    ):
        assert client.recv(40, socket.MSG_WAITALL) == VERSION_NOTICE


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 72, b"\x80\x04\x95", b"s\x00"])
def test_server_refuses_garbage_at_its_first_bytes_and_answers_nothing(garbage: bytes) -> None:
    with pytest.raises(ClientRefusedError, match="something else than a handshake") as refused:
        new_server().take(garbage)
    assert refused.value.answer == b""
