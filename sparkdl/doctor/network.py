"""Surveys the network on every *rank*, and judges the result.

The survey finds which addresses of each host the other hosts can reach, and how fast data is transferred.
:func:`judge_network` is a pure function of the surveys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective import (
    Address,
    AuthenticatedListener,
    Rendezvous,
    all_gather_bytes,
    connect_authenticated,
    find_hosts,
    open_communicator,
)
from sparkdl.doctor.finding import BAD, GOOD, NOTE, Finding
from sparkdl.errors import SparkdlError
from sparkdl.host_memory import in_bytes
from sparkdl.planner.cluster import advice_on_hosts
from sparkdl.rendezvous.addresses import LOOPBACK, interface_addresses, is_local

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.launch import RankContext


_CONNECT_TIMEOUT_S = 2.0
_MAX_ATTEMPTS = 16
_PIECE_BYTES = 4 << 20
_NUM_BARRIERS = 20
_MAX_ROUNDS = 15
"""Maximum number of rounds of measurements. In a round, every host has one partner."""

Survey = dict[str, Any]


def survey_network(context: RankContext, secret: bytes, *, seconds: float, timeout_s: float) -> Survey:
    """Try all addresses of the other hosts, then measure transfers between hosts and inside each host.

    Args:
        context: context of this rank.
        secret: secret that authenticates the ranks to each other.
        seconds: about how many seconds each transfer is measured.
        timeout_s: maximal seconds of each step that the ranks take together.

    Returns:
        A dict of ``host_of_rank``: host of each rank; ``attempts``, filled on the first rank of each host: lists of
        ``[to host, interface, address, failure]``, in which the failure is empty if the address was reached; ``rates``
        that this rank measured: lists of ``[rank, rank, by, bytes per second, seconds of a barrier]``; and
        ``failure``: why no data could be sent, or empty.
    """
    rendezvous = context.rendezvous.view("doctor")
    world: dict[str, Any] = {"rank": context.rank, "world_size": context.world_size, "timeout_s": timeout_s}
    hosts = find_hosts(rendezvous, **world)
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    survey: Survey = {"host_of_rank": list(hosts), "attempts": [], "rates": [], "failure": ""}
    if len(leaders) > 1:
        survey["attempts"] = _try_addresses(rendezvous, secret, hosts, leaders, world)
    try:
        survey["rates"] = _measure(rendezvous, secret, hosts, leaders, world, seconds)
    except SparkdlError as error:
        survey["failure"] = str(error)
    return survey


def _try_addresses(
    rendezvous: Rendezvous,
    secret: bytes,
    hosts: Sequence[int],
    leaders: Sequence[int],
    world: dict[str, Any],
) -> list[tuple[int, str, str, str]]:
    rank = world["rank"]
    interfaces = {
        name: [host for host in hosts if is_local(host)] for name, hosts in interface_addresses().items()
    }
    with AuthenticatedListener(
        secret,
        purpose=_purpose(rank),
        host=[host for hosts in interfaces.values() for host in hosts] or LOOPBACK,
        on_connection=lambda sock: sock.close(),
    ) as listener:
        offer = json.dumps([interfaces, listener.address.port]).encode()
        offers = all_gather_bytes(rendezvous, key="interfaces", value=offer, **world)
        attempts = []
        if rank in leaders:
            for leader in leaders:
                if leader == rank:
                    continue
                there, port = json.loads(offers[leader])
                attempts += [
                    (hosts[leader], name, leader, host, port)
                    for name, addresses in there.items()
                    for host in addresses
                ]
        with ThreadPoolExecutor(max_workers=_MAX_ATTEMPTS) as pool:
            failures = list(pool.map(lambda attempt: _failure(secret, *attempt[2:]), attempts))
        all_gather_bytes(rendezvous, key="interfaces tried", value=b"", **world)
    return [
        (host, name, address, failure)
        for (host, name, _, address, _), failure in zip(attempts, failures, strict=True)
    ]


def _purpose(rank: int) -> bytes:
    """Return the purpose of connections to a rank: at an address that all hosts have, another rank may listen."""
    return b"sparkdl doctor, rank %d" % rank


def _failure(secret: bytes, rank: int, host: str, port: int) -> str:
    try:
        connect_authenticated(
            Address((host,), port), secret, purpose=_purpose(rank), timeout_s=_CONNECT_TIMEOUT_S
        ).close()
    except (OSError, SparkdlError) as error:
        return str(error)
    return ""


def _measure(
    rendezvous: Rendezvous,
    secret: bytes,
    hosts: Sequence[int],
    leaders: Sequence[int],
    world: dict[str, Any],
    seconds: float,
) -> list[tuple[int, int, str, float, float]]:
    rank, rates = world["rank"], []
    by_tcp = open_communicator(
        rendezvous=rendezvous, secret=secret, transport="tcp", name="doctor/tcp", host_of_rank=hosts, **world
    )
    with by_tcp:
        for pairs in rounds(leaders)[:_MAX_ROUNDS]:
            mine = [pair for pair in pairs if rank in pair]
            rates += [(*pair, "TCP", *_rate(by_tcp, pair, seconds)) for pair in mine]
            by_tcp.barrier()
    with open_communicator(
        rendezvous=rendezvous, secret=secret, name="doctor/auto", host_of_rank=hosts, **world
    ) as inside:
        for host, leader in enumerate(leaders):
            neighbours = [other for other in range(world["world_size"]) if hosts[other] == host][:2]
            if len(neighbours) == 2 and rank in neighbours:
                assert neighbours[0] == leader, "ranks are in order"
                pair = (neighbours[0], neighbours[1])
                rates.append((*pair, "inside", *_rate(inside, pair, seconds)))
        inside.barrier()
    return rates


def rounds(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return all pairs, in rounds in which each rank has one partner: the circle method of tournaments."""
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    findings = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meetings = zip(circle[:half], reversed(circle[half:]), strict=True)
        findings.append([(min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return findings


def _rate(communicator: Communicator, pair: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Measure the bytes per second from the first rank of a pair to the second, and the seconds of a barrier."""
    both = communicator.split(pair, f"{pair[0]} to {pair[1]}")
    with both:
        both.barrier()
        began = time.perf_counter()
        for _ in range(_NUM_BARRIERS):
            both.barrier()
        round_trip_s = (time.perf_counter() - began) / _NUM_BARRIERS
        data = np.zeros(_PIECE_BYTES, np.uint8)
        num_pieces = np.ones(1, np.int64)
        took_s = _send(both, data, 1)
        # The time of the first piece gives the number of further pieces; both ranks take that of the first rank.
        num_pieces[0] = max(1, min(1000, round(seconds / took_s)))
        both.broadcast(num_pieces, root=0)
        took_s = _send(both, data, int(num_pieces[0]))
    return float(num_pieces[0]) * _PIECE_BYTES / took_s, round_trip_s


def _send(both: Communicator, data: np.ndarray[Any, Any], num_pieces: int) -> float:
    began = time.perf_counter()
    for _ in range(num_pieces):
        both.broadcast(data, root=0)
    both.barrier()
    return time.perf_counter() - began


_SLOW_BYTES_PER_S = 50e6
"""Rate below which a link counts as slow: less than half of the rate of a link of 1 Gbit/s."""

_FIREWALL = (
    "Open all TCP ports between the hosts of the cluster (security group, firewall): ranks listen on ports that the "
    "kernel chooses."
)


def judge_network(
    surveys: Sequence[Survey], names: Mapping[int, str], *, has_gpus: bool = False
) -> list[Finding]:
    """Return the findings about the network; on several hosts the last one says how ranks had best communicate.

    Args:
        surveys: surveys of all ranks, in order of rank.
        names: names of the hosts in the findings, by number of the host.
        has_gpus: whether hosts have GPUs.
    """
    hosts = surveys[0]["host_of_rank"]
    findings = []
    for rank, survey in enumerate(surveys):
        by_host: dict[int, list[Sequence[str]]] = {}
        for host, *attempt in survey["attempts"]:
            by_host.setdefault(host, []).append(attempt)
        for host, attempts in by_host.items():
            findings.append(_reach(names[hosts[rank]], names[host], attempts))
    for rank, survey in enumerate(surveys):
        for first, second, by, bytes_per_s, round_trip_s in survey["rates"]:
            if first == rank:
                findings.append(_rate_finding(names, hosts, (first, second), by, bytes_per_s, round_trip_s))
    failures = list(dict.fromkeys(survey["failure"] for survey in surveys if survey["failure"]))
    findings += [
        Finding(check="transfer", where="all ranks", status=BAD, found=failure, advice=_FIREWALL)
        for failure in failures[:1]
    ]
    between_hosts = [rate for survey in surveys for _, _, by, rate, _ in survey["rates"] if by == "TCP"]
    if between_hosts:
        findings.append(_communication(len(set(hosts)), min(between_hosts), has_gpus))
    return findings


def _communication(num_hosts: int, bytes_per_s: float, has_gpus: bool) -> Finding:
    text = f"{num_hosts} hosts, at least {bytes_per_s / 1e6:,.0f} MB/s between two by TCP"
    return Finding(
        check="communication",
        where="all ranks",
        status=GOOD,
        found=f"{text}; fabrics that only NCCL uses are not measured" if has_gpus else text,
        advice=" ".join(advice_on_hosts(num_hosts, bytes_per_s, is_cpu=not has_gpus)),
    )


def _reach(source: str, target: str, attempts: Sequence[Sequence[str]]) -> Finding:
    reached = [f"{name} {address}" for name, address, failure in attempts if not failure]
    missed = [f"{name} {address}" for name, address, failure in attempts if failure]
    where = f"{source} to {target}"
    not_reached = f"; not {', '.join(missed)}" if missed else ""
    if reached:
        # An unreachable address only delays the connection, once, by a quarter of a second.
        return Finding(
            check="interfaces", where=where, status=GOOD, found=f"reaches {', '.join(reached)}{not_reached}"
        )
    reasons = "; ".join(dict.fromkeys(failure for _, _, failure in attempts)) or "it has no address"
    return Finding(
        check="interfaces",
        where=where,
        status=BAD,
        found=f"reaches none of its addresses{': ' if missed else ''}{', '.join(missed)} ({reasons})",
        advice=_FIREWALL,
    )


def _rate_finding(
    names: Mapping[int, str],
    hosts: Sequence[int],
    pair: tuple[int, int],
    by: str,
    bytes_per_s: float,
    round_trip_s: float,
) -> Finding:
    first, second = (names[hosts[rank]] for rank in pair)
    text = f"{bytes_per_s / 1e6:,.0f} MB/s, {round_trip_s * 1e6:,.0f} us for a barrier"
    if by != "TCP":
        return Finding(check="transfer", where=first, status=GOOD, found=f"{text}, between two of its ranks")
    is_slow = bytes_per_s < _SLOW_BYTES_PER_S
    return Finding(
        check="transfer",
        where=f"{first} to {second}",
        status=NOTE if is_slow else GOOD,
        found=f"{text}, by TCP",
        advice=f"That is slow for training: {in_bytes(100 << 20)} of gradients take {(100 << 20) / bytes_per_s:.1f} s. "
        "Look at which interface is used, and who else uses it."
        if is_slow
        else "",
    )
