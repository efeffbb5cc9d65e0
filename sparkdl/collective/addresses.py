"""Where a listener can be reached: the addresses of this machine's interfaces, and listening on them.

Whoever listens binds port 0, keeps the socket and publishes the :class:`Address`; host names are never
resolved.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import socket
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SIOCGIFADDR = 0x8915
_MAX_HOSTS = 64
_BACKLOG = 1024

# The same few are looked at whenever a communicator is opened, and parsing one costs 10 us.
_parse = lru_cache(maxsize=1024)(ipaddress.ip_address)


@dataclass(frozen=True)
class Address:
    """Where one listener can be reached.

    Attributes:
        hosts: IPv4 and IPv6 addresses in order of preference, loopback last; they are candidates, as it
            depends on the peer which of them lead here.
        port: TCP port, the same on all of them.
    """

    hosts: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        return f"{', '.join(self.hosts)} port {self.port}"

    def to_bytes(self) -> bytes:
        """Encode as JSON, for a rendezvous or a barrier's message."""
        return json.dumps({"hosts": list(self.hosts), "port": self.port}).encode()

    @classmethod
    def from_bytes(cls, data: bytes | str) -> Address:
        """Decode what :meth:`to_bytes` made.

        Raises:
            ValueError: if it is anything else.
        """
        fields = json.loads(data)
        if not isinstance(fields, dict) or set(fields) != {"hosts", "port"}:
            raise ValueError(f"not an address: {data!r}")
        hosts, port = fields["hosts"], fields["port"]
        if not isinstance(hosts, list) or not 0 < len(hosts) <= _MAX_HOSTS or not isinstance(port, int):
            raise ValueError(f"not an address: {data!r}")
        if not 0 < port < 1 << 16:
            raise ValueError(f"port {port} of an address is outside 1 to 65535")
        return cls(hosts=tuple(str(_parse(host)) for host in hosts), port=port)


def local_addresses() -> tuple[str, ...]:
    """List this machine's addresses: that of the default route first, IPv6 after IPv4, loopback last.

    Link-local IPv6 addresses are left out: they mean nothing without the name of the peer's interface.
    """
    found = list(dict.fromkeys([*_route_addresses(), *_ipv4_addresses(), *_ipv6_addresses()]))
    usable = [host for host in found if not _parse(host).is_link_local]
    usable.sort(key=lambda host: _parse(host).is_loopback)
    return tuple(usable) or ("127.0.0.1",)


def interface_addresses() -> dict[str, list[str]]:
    """This machine's addresses by the names of their interfaces, without loopback and link-local ones."""
    found: dict[str, list[str]] = {}
    for name, host in [*_ipv4_of_interfaces(), *_ipv6_of_interfaces()]:
        if not _parse(host).is_loopback and not _parse(host).is_link_local:
            found.setdefault(name, []).append(host)
    return found


def listen(host: str | None = None) -> tuple[socket.socket, Address]:
    """Listen on a free port, which the returned socket keeps.

    Args:
        host: address to bind; all interfaces, IPv4 and IPv6, when None.

    Raises:
        OSError: if the address is not one of this machine's.
    """
    if host is not None:
        family = socket.AF_INET6 if _parse(host).version == 6 else socket.AF_INET
        sock = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        hosts: Sequence[str] = [host]
    elif socket.has_dualstack_ipv6() and _has_ipv6():
        sock = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        hosts = local_addresses()
    else:
        sock = socket.create_server(("", 0), backlog=_BACKLOG)
        hosts = [address for address in local_addresses() if ":" not in address]
    return sock, Address(hosts=tuple(hosts[:_MAX_HOSTS]), port=sock.getsockname()[1])


def _route_addresses() -> Iterator[str]:
    # Connecting a datagram socket sends nothing; it only asks the routing table which source address it would
    # use.
    for family, anywhere in ((socket.AF_INET, "192.0.2.254"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((anywhere, 9))
            yield str(sock.getsockname()[0])


def _ipv4_addresses() -> Iterator[str]:
    yield from (host for _, host in _ipv4_of_interfaces())


def _ipv6_addresses() -> Iterator[str]:
    yield from (host for _, host in _ipv6_of_interfaces())


def _ipv4_of_interfaces() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            yield name, socket.inet_ntop(socket.AF_INET, answer[20:24])


def _ipv6_of_interfaces() -> Iterator[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return
    for line in lines:
        fields = line.split()
        yield fields[-1], str(ipaddress.IPv6Address(bytes.fromhex(fields[0])))


def _has_ipv6() -> bool:
    return any(True for _ in _ipv6_addresses())
