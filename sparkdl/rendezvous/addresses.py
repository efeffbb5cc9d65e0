"""Where a listener can be reached: the addresses of this machine's interfaces, and listening on them.

A listener binds only the addresses that its peers get, on a port that the system chooses. It keeps the sockets and
publishes the :class:`Address`, with :data:`LOOPBACK` if all peers are on this machine, otherwise with the result of
:func:`reachable_hosts`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import json
import logging
import os
import queue
import socket
import struct
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LISTEN = "SPARKDL_LISTEN"
"""Environment variable with the addresses on which to listen for other machines."""

_SIOCGIFADDR = 0x8915
_MAX_HOSTS = 64
_BACKLOG = 4096
"""As many as most kernels allow (net.core.somaxconn)."""

_PORT_TRIES = 20
_RESOLVE_TIMEOUT_S = 2.0

# Every opening of a communicator parses the same few addresses, at 10 us each.
_parse = lru_cache(maxsize=1024)(ipaddress.ip_address)


@dataclass(frozen=True)
class Address:
    """The address of one listener.

    Attributes:
        hosts: IPv4 and IPv6 addresses in order of preference; not every peer can reach all of them.
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
        """Decode the output of :meth:`to_bytes`.

        Raises:
            ValueError: if it is anything else.
        """
        fields = json.loads(data)
        match fields:
            case {"hosts": [_, *_] as hosts, "port": int(port)} if (
                len(hosts) <= _MAX_HOSTS and 0 < port < 1 << 16
            ):
                return cls(hosts=tuple(str(_parse(host)) for host in hosts), port=port)
        raise ValueError(f"not an address: {data!r}")


def local_addresses() -> tuple[str, ...]:
    """List this machine's addresses: those of the default route first, IPv6 after IPv4, loopback last.

    Link-local IPv6 addresses are left out: they mean nothing without the name of the peer's interface.
    """
    of_interfaces = [host for _, host in (*_ipv4_of_interfaces(), *_ipv6_of_interfaces())]
    hosts = dict.fromkeys([*_route_addresses(), *of_interfaces])
    usable = [host for host in hosts if not _parse(host).is_link_local]
    usable.sort(key=lambda host: _parse(host).is_loopback)
    return tuple(usable) or ("127.0.0.1",)


def interface_addresses() -> dict[str, list[str]]:
    """This machine's addresses by the names of their interfaces, without loopback and link-local ones."""
    hosts_of: dict[str, list[str]] = {}
    for name, host in [*_ipv4_of_interfaces(), *_ipv6_of_interfaces()]:
        if _is_usable(host):
            hosts_of.setdefault(name, []).append(host)
    return hosts_of


def reachable_hosts(preferred: Iterable[str] = ()) -> tuple[str, ...]:
    """Choose the addresses of this machine on which to listen for other machines.

    If the environment variable ``SPARKDL_LISTEN`` is set, it names them: addresses, networks (``10.0.0.0/8``) or
    interfaces (``eth1``), separated by commas, or ``all``. Otherwise they are the addresses in ``preferred`` that
    belong to this machine, with loopback only if it has no other among them; if there are none, the addresses from
    which packets leave on the default route; if there are none, all addresses but loopback; if there are none,
    loopback.

    Args:
        preferred: addresses of this machine that others are known to reach.

    Raises:
        ParamError: if ``SPARKDL_LISTEN`` matches no address of this machine.
    """
    if wanted := os.environ.get(LISTEN, "").strip():
        return _matching(wanted)
    known = [host for host in dict.fromkeys(preferred) if is_local(host)]
    candidates = [
        [host for host in known if not _parse(host).is_loopback],
        known,
        [host for host in _route_addresses() if _is_usable(host)],
        [host for host in local_addresses() if _is_usable(host)],
    ]
    return tuple(next((hosts for hosts in candidates if hosts), [LOOPBACK]))


def is_local(host: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        address = _parse(host)
        if address.is_unspecified:
            return False
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host name or address means the local machine on every machine."""
    try:
        return _parse(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolve(name: str) -> tuple[str, ...]:
    """The addresses of a host; none if it is unknown, or if its name server does not answer in time."""
    with contextlib.suppress(ValueError):
        return (str(_parse(name)),)
    answers: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            answers.put(())
        else:
            answers.put(tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))

    # The resolver takes no timeout.
    threading.Thread(target=ask, name="sparkdl-resolve", daemon=True).start()
    try:
        return answers.get(timeout=_RESOLVE_TIMEOUT_S)
    except queue.Empty:
        return ()


def hosts_of_name(name: str) -> tuple[str, ...]:
    """The addresses of this machine to which a host name or address leads other machines; empty if it leads elsewhere.

    A machine's own name often leads to loopback in its own list of hosts, and on other machines to an address at which
    they reach it. Loopback is therefore left out unless ``name`` itself means loopback.
    """
    hosts = [host for host in resolve(name) if is_local(host)]
    if not is_loopback(name):
        hosts = [host for host in hosts if _is_usable(host)]
    return tuple(hosts)


def hosts_known_as(whose: str, *names: str) -> tuple[str, ...]:
    """Choose the addresses on which to listen for machines that know this machine by one of ``names``.

    If no name belongs to this machine, return those of :func:`reachable_hosts`, and log a warning once.

    Args:
        whose: text that says where the first name comes from.
        names: host names or addresses, in order of preference.
    """
    known = next(filter(None, map(hosts_of_name, names)), ())
    hosts = reachable_hosts(known)
    if not known:
        _warn_once(
            f"{whose} is {names[0]!r}, which is not an address of this machine, so this process listens on "
            f"{', '.join(hosts)}. If other machines cannot reach that, say where they can in {LISTEN}."
        )
    return hosts


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def route_host(host: str) -> str | None:
    """The address of this machine from which packets to ``host`` leave; None without a route. No packet is sent."""
    version = _parse(host).version
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))
        return str(sock.getsockname()[0])
    return None


def listen(host: str | Sequence[str] | None = None) -> tuple[list[socket.socket], Address]:
    """Listen on a free port; return one listening socket per address, all with the same port, and the address.

    Args:
        host: address or addresses to bind; those of :func:`reachable_hosts` when None.

    Raises:
        OSError: if an address is not one of this machine's.
    """
    hosts = reachable_hosts() if host is None else [host] if isinstance(host, str) else list(host)
    hosts = list(hosts)[:_MAX_HOSTS]
    for tries_left in reversed(range(_PORT_TRIES)):
        sockets: list[socket.socket] = []
        try:
            for one in hosts:
                port = sockets[0].getsockname()[1] if sockets else 0
                family = socket.AF_INET6 if _parse(one).version == 6 else socket.AF_INET
                sockets.append(socket.create_server((one, port), family=family, backlog=_BACKLOG))
            return sockets, Address(hosts=tuple(hosts), port=sockets[0].getsockname()[1])
        except OSError as error:
            for sock in sockets:
                sock.close()
            # The port of the first address is taken on another address.
            if not (sockets and tries_left and error.errno == errno.EADDRINUSE):
                raise
    raise AssertionError("the last try returns or raises")


def _is_usable(host: str) -> bool:
    return not _parse(host).is_loopback and not _parse(host).is_link_local


def _matching(wanted: str) -> tuple[str, ...]:
    """The addresses of this machine that ``SPARKDL_LISTEN`` names."""
    interfaces = interface_addresses()
    everything = local_addresses()
    if wanted == "all":
        return tuple(host for host in everything if _is_usable(host)) or (LOOPBACK,)
    matching: list[str] = []
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        if word in interfaces:
            matching += interfaces[word]
            continue
        try:
            network = ipaddress.ip_network(word, strict=False)
        except ValueError:  # an interface that this machine does not have, as where machines differ
            continue
        if network.num_addresses == 1 and is_local(str(network.network_address)):
            matching.append(str(network.network_address))
        else:
            matching += [host for host in everything if _parse(host) in network]
    if not matching:
        there = ", ".join(f"{name} {' '.join(hosts)}" for name, hosts in interfaces.items()) or "none"
        raise ParamError(
            f"{LISTEN}={wanted!r} matches no address of this machine; its interfaces are: {there}. Name interfaces,"
            " addresses or networks such as 10.0.0.0/8, separated by commas, or unset it."
        )
    return tuple(dict.fromkeys(matching))


def _route_addresses() -> Iterator[str]:
    for anywhere in ("192.0.2.254", "2001:db8::1"):
        if (host := route_host(anywhere)) is not None:
            yield host


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
