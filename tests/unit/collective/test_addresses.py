from __future__ import annotations

import ipaddress
import socket
from contextlib import ExitStack

import pytest

from sparkdl.collective import Address, connect_any, listen, local_addresses


def test_loopback_comes_last() -> None:
    loopback = [ipaddress.ip_address(host).is_loopback for host in local_addresses()]
    assert loopback
    assert loopback == sorted(loopback)


def test_every_local_address_leads_to_the_listener() -> None:
    sockets, address = listen(local_addresses())
    with ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
        assert {sock.getsockname()[1] for sock in sockets} == {address.port}
        for host in address.hosts:
            connect_any(Address(hosts=(host,), port=address.port), timeout_s=5.0).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listener_on_one_address_has_only_that(host: str) -> None:
    if host not in local_addresses():
        pytest.skip(f"this machine has no {host}")
    (sock,), address = listen(host)
    with sock:
        assert address.hosts == (host,)
        connect_any(address, timeout_s=5.0).close()


def test_listening_where_one_is_not_fails() -> None:
    with pytest.raises(OSError):
        listen("192.0.2.77")


def test_address_survives_the_way_through_bytes() -> None:
    address = Address(hosts=("10.1.2.3", "fd00::7"), port=4711)
    assert Address.from_bytes(address.to_bytes()) == address


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "nonsense",
        '{"hosts": [], "port": 1}',
        '{"hosts": ["10.0.0.1"], "port": 0}',
        '{"hosts": ["10.0.0.1"], "port": 70000}',
        '{"hosts": ["10.0.0.1"], "port": "80"}',
        '{"hosts": ["evil.example"], "port": 80}',
        '{"hosts": "10.0.0.1", "port": 80}',
    ],
)
def test_anything_else_is_not_an_address(text: str) -> None:
    with pytest.raises(ValueError):
        Address.from_bytes(text)


def test_listening_socket_keeps_its_port() -> None:
    (sock,), address = listen("127.0.0.1")
    with sock, socket.socket() as rival, pytest.raises(OSError):
        rival.bind(("127.0.0.1", address.port))
