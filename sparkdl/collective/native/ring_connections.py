"""Rings of authenticated TCP connections between ranks, for the native core.

The *lifeline* ring connects all ranks and detects lost ones; a *lane* ring connects the hosts and carries data. Runs
on every rank while a communicator opens; afterwards no rank listens for connections any more.
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import AuthenticationError, CommunicatorError, CommunicatorTimeoutError, MismatchError
from sparkdl.rendezvous.addresses import Address, reachable_hosts
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.dialing import connect_authenticated
from sparkdl.rendezvous.frames import receive_frame, send_frame
from sparkdl.rendezvous.listener import AuthenticatedListener
from sparkdl.rendezvous.store import Rendezvous, all_gather_bytes
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from sparkdl.topology import Topology

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
_MAX_HELLO_BYTES = 4096
_WELCOME = b"welcome"
_FAILURE_KEY = "connections/failure"
_FAILURE_KINDS: tuple[type[Exception], ...] = (
    AuthenticationError,
    CommunicatorTimeoutError,
    CommunicatorError,
)
"""From the most specific to the most general."""

_POLL_S = 0.5
"""How long a rank waits for its neighbour before it checks whether some rank has given up."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The neighbours of a rank in one ring.

    Attributes:
        next: rank to which this one connects.
        previous: rank that connects to this one.
    """

    next: int
    previous: int


def plan_rings(topology: Topology) -> dict[str, Ring]:
    """Return the rings to which this rank belongs: ``"lifeline"`` over all ranks, ``"lane"`` over the hosts.

    Lane i connects the ranks with local rank i. There are as many lanes as the smallest host has ranks.
    """
    rings = {}
    if topology.world_size > 1:
        rings["lifeline"] = _neighbours(tuple(range(topology.world_size)), topology.rank)
    num_lanes = min(map(len, topology.ranks_by_host))
    if topology.num_hosts > 1 and topology.local_rank < num_lanes:
        rings["lane"] = _neighbours(topology.cross_ranks, topology.rank)
    return rings


def connect_rings(
    rendezvous: Rendezvous,
    *,
    topology: Topology,
    secret: bytes,
    name: str,
    timeout_s: float,
    wire: str = "float32",
    listen_on: Sequence[str] | None = None,
) -> dict[str, tuple[int, int]]:
    """Connect this rank to its neighbours in the rings of :func:`plan_rings`; all ranks take part.

    Args:
        rendezvous: part of the rendezvous for this communicator only.
        topology: topology of this rank.
        secret: the job's secret.
        name: name of the communicator.
        timeout_s: seconds for the whole call.
        wire: format in which sums and averages of float32 travel between hosts.
        listen_on: addresses of this machine at which its neighbours reach it. When None,
            :func:`~sparkdl.rendezvous.addresses.reachable_hosts` chooses them, first those that connect this machine
            and the rendezvous.

    Returns:
        For each ring, the descriptors of the connections to the next and from the previous rank, in blocking mode; the
        caller closes them.

    Raises:
        MismatchError: on every rank, if the ranks disagree about ``wire``.
        AuthenticationError: if a neighbour has another secret.
        CommunicatorError: if a neighbour cannot be reached; the message lists what was tried.
        CommunicatorTimeoutError: if a neighbour does not connect in time; the message names it.
    """
    rings = plan_rings(topology)
    if not rings:
        return {}
    hosts = listen_on or reachable_hosts(rendezvous.hosts_here())
    with AuthenticatedListener(secret, purpose=_purpose(name, topology.rank), host=hosts) as listener:
        # A rank that gives up publishes this before it closes its listener; otherwise its neighbours would report a
        # network error.
        try:
            deadline = Deadline(timeout_s)
            addresses = _exchange_addresses(rendezvous, listener.address, topology, wire, deadline)
            return _connect(
                rendezvous,
                listener,
                addresses,
                topology.rank,
                rings,
                secret=secret,
                name=name,
                deadline=deadline,
            )
        except MismatchError:
            raise
        except (OSError, CommunicatorError) as error:
            raise _first_failure(rendezvous, topology.rank, error) from error


def _exchange_addresses(
    rendezvous: Rendezvous, address: Address, topology: Topology, wire: str, deadline: Deadline
) -> list[Address]:
    values = all_gather_bytes(
        rendezvous,
        key="connections/addresses",
        rank=topology.rank,
        world_size=topology.world_size,
        value=f"{wire}\n".encode() + address.to_bytes(),
        timeout_s=deadline.remaining_s(),
    )
    wires, addresses = zip(*(value.decode().split("\n", 1) for value in values), strict=True)
    if len(set(wires)) > 1:
        said = "; ".join(f"rank {rank} said {other!r}" for rank, other in enumerate(wires))
        raise MismatchError(f"the ranks disagree about how to send float32 between hosts (wire): {said}")
    return [Address.from_bytes(other) for other in addresses]


def _connect(
    rendezvous: Rendezvous,
    listener: AuthenticatedListener,
    addresses: list[Address],
    rank: int,
    rings: Mapping[str, Ring],
    *,
    secret: bytes,
    name: str,
    deadline: Deadline,
) -> dict[str, tuple[int, int]]:
    with ExitStack() as stack:
        outgoing = {}
        for kind, ring in rings.items():
            sock = _dial(addresses[ring.next], secret, name, ring.next, deadline)
            outgoing[kind] = stack.enter_context(sock)
            send_frame(sock, _hello(name, kind, rank), deadline=deadline)
        incoming = _accept_all(rendezvous, listener, rings, stack, name=name, deadline=deadline)
        for kind, ring in rings.items():
            _await_welcome(outgoing[kind], kind, ring.next, deadline)
        for sock in (*outgoing.values(), *incoming.values()):
            sock.settimeout(None)
        stack.pop_all()
    return {kind: (outgoing[kind].detach(), incoming[kind].detach()) for kind in rings}


def _first_failure(rendezvous: Rendezvous, rank: int, error: Exception) -> Exception:
    """Publish why this rank gives up; return the error of the first rank that gave up."""
    kind = next((kind for kind in _FAILURE_KINDS if isinstance(error, kind)), CommunicatorError)
    news = json.dumps({"rank": rank, "kind": kind.__name__, "text": str(error)}).encode()
    try:
        first = rendezvous.compare_set(_FAILURE_KEY, b"", news)
    except CommunicatorError:
        return error
    return _failure_of(first) if first != news else kind(str(error))


def _failure_of(news: bytes) -> Exception:
    failure = json.loads(news)
    kinds = {kind.__name__: kind for kind in _FAILURE_KINDS}
    return kinds[failure["kind"]](f"rank {failure['rank']} could not connect: {failure['text']}")


def _neighbours(ranks: tuple[int, ...], rank: int) -> Ring:
    position = ranks.index(rank)
    return Ring(next=ranks[(position + 1) % len(ranks)], previous=ranks[position - 1])


def _purpose(name: str, rank: int) -> bytes:
    return f"sparkdl communicator {name} rank {rank}".encode()


def _hello(name: str, kind: str, rank: int) -> bytes:
    return f"{name}\n{kind}\n{rank}".encode()


def _dial(address: Address, secret: bytes, name: str, rank: int, deadline: Deadline) -> socket.socket:
    try:
        return connect_authenticated(
            address, secret, purpose=_purpose(name, rank), timeout_s=deadline.remaining_s()
        )
    except AuthenticationError:
        raise
    except OSError as error:
        raise CommunicatorError(
            f"cannot connect to rank {rank}: {error}."
            " Check that a firewall lets ranks reach each other on any port."
        ) from error


def _accept_all(
    rendezvous: Rendezvous,
    listener: AuthenticatedListener,
    rings: Mapping[str, Ring],
    stack: ExitStack,
    *,
    name: str,
    deadline: Deadline,
) -> dict[str, socket.socket]:
    """Return the connection of the previous rank in each ring, which the stack closes."""
    accepted: dict[str, socket.socket] = {}
    expected = {_hello(name, kind, ring.previous): kind for kind, ring in rings.items()}
    while len(accepted) < len(rings):
        try:
            sock = listener.accept(timeout_s=deadline.at_most(_POLL_S).timeout_s)
        except TimeoutError as error:
            if rendezvous.check([_FAILURE_KEY]):
                raise _failure_of(rendezvous.get(_FAILURE_KEY, _POLL_S)) from error
            if not deadline.expired:
                continue
            missing = sorted({ring.previous for kind, ring in rings.items() if kind not in accepted})
            raise CommunicatorTimeoutError(
                f"{name_ranks(missing)} did not connect within {deadline.timeout_s:g} s."
                " Check that a firewall lets ranks reach each other on any port."
            ) from error
        kind = _hear_hello(sock, expected, deadline)
        if kind is None or kind in accepted:
            sock.close()
            continue
        accepted[kind] = stack.enter_context(sock)
        send_frame(sock, _WELCOME, deadline=deadline)
    return accepted


def _hear_hello(sock: socket.socket, expected: Mapping[bytes, str], deadline: Deadline) -> str | None:
    try:
        hello = receive_frame(sock, max_bytes=_MAX_HELLO_BYTES, deadline=deadline.at_most(_HELLO_TIMEOUT_S))
    except OSError as error:
        logger.warning("A rank connected and then said nothing: %s", error)
        return None
    if hello not in expected:
        logger.warning("Turned away a rank that is not a neighbour; it said %r", hello)
    return expected.get(hello)


def _await_welcome(sock: socket.socket, kind: str, rank: int, deadline: Deadline) -> None:
    try:
        answer = receive_frame(sock, max_bytes=len(_WELCOME), deadline=deadline)
    except OSError as error:
        raise CommunicatorError(f"rank {rank} did not confirm the {kind} connection: {error}") from error
    if answer != _WELCOME:
        raise CommunicatorError(f"rank {rank} answered the {kind} connection with {answer!r}")
