from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from sparkdl.errors import ParamError
from sparkdl.rendezvous.addresses import (
    LISTEN,
    Address,
    hosts_of_name,
    interface_addresses,
    is_local,
    is_loopback,
    listen,
    local_addresses,
    reachable_hosts,
    resolve,
)

OTHERS = "198.51.100.77"
"""An address that no machine has (RFC 5737)."""


def test_loopback_comes_last() -> None:
    loopback = list(map(is_loopback, local_addresses()))
    assert loopback
    assert loopback == sorted(loopback)


def test_every_local_address_leads_to_the_listener() -> None:
    sockets, address = listen(local_addresses())
    with ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
        assert {sock.getsockname()[1] for sock in sockets} == {address.port}
        for host in address.hosts:
            socket.create_connection((host, address.port), 5.0).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listener_on_one_address_announces_only_that_address(host: str) -> None:
    if host not in local_addresses():
        pytest.skip(f"this machine has no {host}")
    (sock,), address = listen(host)
    with sock:
        assert address.hosts == (host,)
        socket.create_connection((host, address.port), 5.0).close()


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
def test_invalid_bytes_are_not_an_address(text: str) -> None:
    with pytest.raises(ValueError):
        Address.from_bytes(text)


def test_listening_socket_keeps_its_port() -> None:
    (sock,), address = listen("127.0.0.1")
    with sock, socket.socket() as rival, pytest.raises(OSError):
        rival.bind(("127.0.0.1", address.port))


def test_loopback_is_announced_only_if_there_is_no_other_address() -> None:
    hosts = reachable_hosts()
    assert hosts
    assert all(map(is_local, hosts))
    others = [host for host in local_addresses() if not is_loopback(host)]
    assert not any(map(is_loopback, hosts)) if others else hosts == ("127.0.0.1",)


def test_given_addresses_are_preferred_if_they_are_of_this_machine() -> None:
    own = local_addresses()[0]
    assert reachable_hosts([OTHERS, "127.0.0.1", own]) == (own,)
    assert reachable_hosts(["127.0.0.1"]) == ("127.0.0.1",)
    assert reachable_hosts([OTHERS]) == reachable_hosts()


def test_user_says_where_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hosts in interface_addresses().items():
        usable = [host for host in hosts if is_local(host)]
        monkeypatch.setenv(LISTEN, f"missing0, {name}")
        assert reachable_hosts(["127.0.0.1"]) == tuple(usable)
        monkeypatch.setenv(LISTEN, usable[0])
        assert reachable_hosts() == (usable[0],)
    monkeypatch.setenv(LISTEN, "127.0.0.0/8")
    assert reachable_hosts([local_addresses()[0]]) == ("127.0.0.1",)
    monkeypatch.setenv(LISTEN, "127.0.0.5")
    assert reachable_hosts() == ("127.0.0.5",)
    monkeypatch.setenv(LISTEN, "all")
    everywhere = reachable_hosts()
    assert set(everywhere) >= set(filter(lambda host: not is_loopback(host), local_addresses()))
    for wrong in (OTHERS, "missing0", "10.0.0.0/99", ","):
        monkeypatch.setenv(LISTEN, wrong)
        with pytest.raises(ParamError, match=f"SPARKDL_LISTEN='{wrong}' matches no address"):
            reachable_hosts()


def test_names_resolve_only_to_addresses_of_this_machine() -> None:
    assert set(hosts_of_name("localhost")) <= {"127.0.0.1", "::1"}
    assert hosts_of_name("127.0.0.1") == ("127.0.0.1",)
    assert hosts_of_name(OTHERS) == ()
    assert hosts_of_name("no-such-host.invalid") == ()
    assert hosts_of_name("0.0.0.0") == ()
    assert resolve("fd00::7") == ("fd00::7",)
    assert not any(map(is_loopback, hosts_of_name(socket.gethostname())))
