from __future__ import annotations

import errno
import os
import socket
import threading
import time
from typing import Any

import pytest

from sparkdl.collective import (
    Address,
    AuthenticatedListener,
    connect_authenticated,
    new_secret,
)
from sparkdl.errors import AuthenticationError
from sparkdl.rendezvous.addresses import listen
from sparkdl.rendezvous.dialing import give_up_undelivered, is_unheard, make_prompt

SECRET = new_secret()
NOBODY = "127.0.0.2"
"""A loopback address on which the tests do not listen: connections are refused at once."""


@pytest.mark.parametrize("host", [NOBODY, "fe80::1%none"])
def test_address_that_refuses_or_that_the_resolver_refuses_is_passed_over(host: str) -> None:
    with AuthenticatedListener(SECRET, host="127.0.0.1") as listener:
        port = listener.address.port
        both = Address(hosts=(host, "127.0.0.1"), port=port)
        with connect_authenticated(both, SECRET, timeout_s=5.0) as found:
            assert found.getpeername() == ("127.0.0.1", port)


def test_address_that_is_silent_does_not_hold_up_the_next() -> None:
    with socket.create_server(("127.0.0.3", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(8)]
        for filler in waiting:  # fill the queue: the kernel drops further connections
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.3", port))
        server = socket.create_server(("127.0.0.1", port))
        with AuthenticatedListener(SECRET, sockets=[server]):
            start = time.monotonic()
            both = Address(hosts=("127.0.0.3", "127.0.0.1"), port=port)
            connect_authenticated(both, SECRET, timeout_s=60.0).close()
            assert time.monotonic() - start < 45.0
        for filler in waiting:
            filler.close()


def test_addresses_without_a_listener_are_a_connection_error_that_lists_what_was_tried() -> None:
    (sock,), address = listen("127.0.0.1")
    sock.close()
    with pytest.raises(ConnectionError) as raised:
        connect_authenticated(Address(("127.0.0.1", NOBODY), address.port), SECRET, timeout_s=5.0)
    assert not isinstance(raised.value, AuthenticationError)
    refused = (f"{host}: Connection refused" for host in ("127.0.0.1", NOBODY))
    for part in (f"port {address.port}", *refused):
        assert part in str(raised.value)


def test_host_whose_kind_of_address_the_kernel_does_not_have_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutIpv6(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *arguments: Any, **options: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *arguments, **options)

    with AuthenticatedListener(SECRET, host="127.0.0.1") as listener:
        port = listener.address.port
        monkeypatch.setattr(socket, "socket", WithoutIpv6)
        both = Address(hosts=("::1", "127.0.0.1"), port=port)
        with connect_authenticated(both, SECRET, timeout_s=5.0) as found:
            assert found.getpeername() == ("127.0.0.1", port)
        with pytest.raises(ConnectionError, match="::1: Address family not supported"):
            connect_authenticated(Address(hosts=("::1",), port=port), SECRET, timeout_s=5.0)


def test_host_that_fails_the_proof_is_passed_over() -> None:
    with AuthenticatedListener(SECRET, host="127.0.0.1") as listener:
        port = listener.address.port
        with socket.create_server((NOBODY, port)) as impostor:

            def answer() -> None:
                victim, _ = impostor.accept()
                with victim:
                    victim.sendall(b"220 mail.example ESMTP" + b" " * 100)

            thread = threading.Thread(target=answer)
            thread.start()
            both = Address(hosts=(NOBODY, "127.0.0.1"), port=port)
            with connect_authenticated(both, SECRET, timeout_s=5.0) as found:
                assert found.getpeername()[0] == "127.0.0.1"
            thread.join()


def test_refused_proof_is_an_authentication_error_at_once() -> None:
    start = time.monotonic()
    with AuthenticatedListener(SECRET, host="127.0.0.1") as listener, pytest.raises(AuthenticationError):
        connect_authenticated(listener.address, new_secret(), timeout_s=60.0)
    assert time.monotonic() - start < 45.0


def test_listener_that_keeps_hanging_up_is_dialed_again_only_after_pauses() -> None:
    num_attempts = 0
    with socket.create_server(("127.0.0.1", 0)) as rude:

        def hang_up() -> None:
            nonlocal num_attempts
            while True:
                try:
                    victim, _ = rude.accept()
                except OSError:
                    return
                num_attempts += 1
                victim.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        address = Address(hosts=("127.0.0.1",), port=rude.getsockname()[1])
        with pytest.raises(AuthenticationError, match="ended the handshake"):
            connect_authenticated(address, SECRET, timeout_s=1.0)
        rude.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert 3 <= num_attempts <= 7


def test_silent_listener_is_an_authentication_error_after_the_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(hosts=("127.0.0.1",), port=silent.getsockname()[1])
        with pytest.raises(AuthenticationError, match="did not prove itself"):
            connect_authenticated(address, SECRET, timeout_s=0.1)


def test_a_machine_whose_process_does_not_read_is_heard() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
    ):
        far, _ = listener.accept()
        with far:
            make_prompt(near)
            near.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    near.send(bytes(1 << 20))
            time.sleep(0.5)  # the window is full, and nothing is acknowledged but probes
            assert not is_unheard(near, 0.1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        is_unheard(near)


def test_unix_sockets_have_no_machine_that_may_vanish() -> None:
    near, far = socket.socketpair()
    with near, far:
        make_prompt(near)
        give_up_undelivered(near)
        assert not is_unheard(near, 0.0)
