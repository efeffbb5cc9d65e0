from __future__ import annotations

import os
import re
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from sparkdl.collective import (
    Address,
    AuthenticatedListener,
    connect_authenticated,
    new_secret,
)
from sparkdl.rendezvous.frames import receive_frame, send_frame
from sparkdl.rendezvous.handshake import ClientHandshake, ServerHandshake
from tests.collective.eventually import eventually
from tests.flood import flooded

SECRET = new_secret()


def stranger_of(listener: AuthenticatedListener) -> socket.socket:
    """A connection to the listener that has not sent anything."""
    return socket.create_connection((listener.address.hosts[0], listener.address.port), 10.0)


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the listener closes the connection within five seconds."""
    sock.settimeout(5.0)
    try:
        while sock.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_accept_without_peers_times_out() -> None:
    with AuthenticatedListener(SECRET) as listener, pytest.raises(TimeoutError):
        listener.accept(timeout_s=0.05)


def test_garbage_is_dropped_and_the_next_peer_served() -> None:
    with AuthenticatedListener(SECRET) as listener:
        for garbage in (b"\x00" * 200, b"GET / HTTP/1.1\r\n\r\n" * 10):
            with stranger_of(listener) as stranger:
                stranger.sendall(garbage)
                assert is_hung_up(stranger)
        connect_authenticated(listener.address, SECRET, timeout_s=5.0).close()
        listener.accept(timeout_s=5.0).close()


def test_silent_stranger_is_dropped_after_its_time() -> None:
    with AuthenticatedListener(SECRET, handshake_timeout_s=0.2) as listener:
        stranger = stranger_of(listener)
        with stranger:
            assert is_hung_up(stranger)


def test_stranger_that_drips_bytes_has_one_deadline_for_all_of_them() -> None:
    with AuthenticatedListener(SECRET, handshake_timeout_s=0.3) as listener, stranger_of(listener) as slow:
        start = time.monotonic()
        with pytest.raises(OSError):
            for byte in ClientHandshake(SECRET, b"").opening:
                slow.sendall(bytes([byte]))
                time.sleep(0.2)
        assert time.monotonic() - start >= 0.3


def test_too_many_silent_strangers_do_not_keep_a_peer_out() -> None:
    with AuthenticatedListener(SECRET, handshake_timeout_s=60.0, max_strangers=4) as listener:
        strangers = [stranger_of(listener) for _ in range(12)]
        connect_authenticated(listener.address, SECRET, timeout_s=20.0).close()
        listener.accept(timeout_s=5.0).close()
        for stranger in strangers:
            stranger.close()


def test_peers_are_served_within_seconds_while_thousands_of_strangers_press_on_the_port(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with AuthenticatedListener(SECRET, host="127.0.0.1") as listener, flooded(listener.address.port, 5000):
        for _ in range(20):
            # Ten seconds for an operation that takes milliseconds on an idle machine.
            client = connect_authenticated(listener.address, SECRET, timeout_s=10.0)
            with client, listener.accept(timeout_s=10.0) as server:
                send_frame(client, b"hello")
                assert receive_frame(server, max_bytes=100) == b"hello"
    told = [record.message for record in caplog.records if "Rejected" in record.message]
    assert 1 <= len(told) <= 3, "told by their number, not one by one"
    assert re.search(r"Rejected \d{3,} more connections to port", told[-1])


def test_peer_that_has_begun_its_handshake_is_not_dropped_for_strangers() -> None:
    with AuthenticatedListener(SECRET, host="127.0.0.1", max_strangers=1) as listener:
        peer, stranger = ClientHandshake(SECRET, b""), stranger_of(listener)
        with stranger, stranger_of(listener) as slow:
            slow.settimeout(10.0)
            slow.sendall(peer.opening)
            answer = peer.take(slow.recv(peer.missing, socket.MSG_WAITALL))
            crowd = [stranger_of(listener) for _ in range(10)]
            assert is_hung_up(crowd[0]), "they do press"
            slow.sendall(answer)
            assert peer.take(slow.recv(peer.missing, socket.MSG_WAITALL)) == b""
            assert peer.missing == 0
            listener.accept(timeout_s=5.0).close()
        for other in crowd:
            other.close()


def test_peer_without_an_answer_tries_again_while_it_waits() -> None:
    """A kernel whose accept queue is full may accept a connection and then silently drop its data."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        address = Address(hosts=("127.0.0.1",), port=server.getsockname()[1])
        trying = pool.submit(connect_authenticated, address, SECRET, timeout_s=60.0)
        server.settimeout(60.0)
        silent, _ = server.accept()
        second, _ = server.accept()
        with silent, second:
            handshake = ServerHandshake(SECRET, b"", lambda _: True)
            while handshake.missing:
                second.sendall(handshake.take(second.recv(handshake.missing)))
            trying.result().close()


def test_listener_without_descriptors_continues_when_some_are_free_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with AuthenticatedListener(SECRET, host="127.0.0.1") as listener, socket.socket() as client:
        client.setblocking(False)
        taken: list[int] = []
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(client.fileno()))
            client.connect_ex((listener.address.hosts[0], listener.address.port))
            assert eventually(lambda: "Accepting a connection" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        connect_authenticated(listener.address, SECRET, timeout_s=10.0).close()
        listener.accept(timeout_s=10.0).close()
    assert caplog.text.count("Accepting a connection") == 1


def test_many_peers_at_once_are_all_served() -> None:
    with AuthenticatedListener(SECRET, max_strangers=4) as listener:
        with ThreadPoolExecutor(max_workers=40) as pool:
            peers = [
                pool.submit(connect_authenticated, listener.address, SECRET, timeout_s=20.0)
                for _ in range(40)
            ]
            for _ in peers:
                listener.accept(timeout_s=20.0).close()
        for peer in peers:
            peer.result().close()


def test_close_wakes_accept_drops_strangers_and_ends_the_thread() -> None:
    listener = AuthenticatedListener(SECRET, handshake_timeout_s=60.0)
    with ThreadPoolExecutor() as pool, stranger_of(listener) as stranger:
        waiting = pool.submit(listener.accept, timeout_s=60.0)
        stranger.settimeout(30.0)
        stranger.sendall(ClientHandshake(SECRET, b"").opening)
        assert stranger.recv(100)  # the handshake has begun
        start = time.monotonic()
        listener.close()
        listener.close()
        assert is_hung_up(stranger)
        assert isinstance(waiting.exception(30.0), ConnectionError)
        assert time.monotonic() - start < 45.0
    with pytest.raises(ConnectionError):
        stranger_of(listener)
