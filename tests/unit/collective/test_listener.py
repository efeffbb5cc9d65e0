from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from sparkdl.collective import AuthenticatedListener, connect_any, connect_authenticated, new_secret

if TYPE_CHECKING:
    import socket

SECRET = new_secret()


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the listener ends the connection within five seconds."""
    sock.settimeout(5.0)
    try:
        while sock.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_proven_connection_is_handed_out() -> None:
    with AuthenticatedListener(SECRET) as listener:
        client = connect_authenticated(listener.address, SECRET, timeout_s=5.0)
        with client, listener.accept(timeout_s=5.0) as server:
            client.sendall(b"hello")
            assert server.recv(10) == b"hello"


def test_nobody_coming_is_a_timeout() -> None:
    with AuthenticatedListener(SECRET) as listener, pytest.raises(TimeoutError):
        listener.accept(timeout_s=0.05)


def test_garbage_is_dropped_and_the_next_peer_served() -> None:
    with AuthenticatedListener(SECRET) as listener:
        for garbage in (b"\x00" * 200, b"GET / HTTP/1.1\r\n\r\n" * 10):
            with connect_any(listener.address, timeout_s=5.0) as stranger:
                stranger.sendall(garbage)
                assert is_hung_up(stranger)
        connect_authenticated(listener.address, SECRET, timeout_s=5.0).close()
        listener.accept(timeout_s=5.0).close()


def test_silent_stranger_is_dropped_after_its_time() -> None:
    with AuthenticatedListener(SECRET, handshake_timeout_s=0.2) as listener:
        stranger = connect_any(listener.address, timeout_s=5.0)
        with stranger:
            assert is_hung_up(stranger)


def test_too_many_silent_strangers_do_not_keep_a_peer_out() -> None:
    with AuthenticatedListener(SECRET, handshake_timeout_s=60.0, max_strangers=4) as listener:
        strangers = [connect_any(listener.address, timeout_s=5.0) for _ in range(12)]
        connect_authenticated(listener.address, SECRET, timeout_s=20.0).close()
        listener.accept(timeout_s=5.0).close()
        for stranger in strangers:
            stranger.close()


def test_many_peers_at_once_are_all_served() -> None:
    with AuthenticatedListener(SECRET, max_strangers=4) as listener:
        threads = [
            threading.Thread(
                target=lambda: connect_authenticated(listener.address, SECRET, timeout_s=20.0).close()
            )
            for _ in range(40)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            listener.accept(timeout_s=20.0).close()
        for thread in threads:
            thread.join()


def test_close_wakes_accept_drops_strangers_and_ends_the_thread() -> None:
    listener = AuthenticatedListener(SECRET)
    raised: list[BaseException] = []

    def accept() -> None:
        try:
            listener.accept(timeout_s=30.0)
        except ConnectionError as error:
            raised.append(error)

    waiting = threading.Thread(target=accept)
    waiting.start()
    with connect_any(listener.address, timeout_s=5.0) as stranger:
        stranger.settimeout(5.0)
        assert stranger.recv(100)  # the handshake has begun
        start = time.monotonic()
        listener.close()
        listener.close()
        assert is_hung_up(stranger)
    waiting.join(5.0)
    assert raised
    assert time.monotonic() - start < 4.0
    with pytest.raises(ConnectionError):
        connect_any(listener.address, timeout_s=1.0)
