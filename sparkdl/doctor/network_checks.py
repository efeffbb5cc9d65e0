"""Judges what a survey of the network has found. Pure: nothing is asked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkdl.doctor.finding import BAD, GOOD, NOTE, Finding
from sparkdl.doctor.machine_checks import size
from sparkdl.doctor.network_survey import Survey

_SLOW_BYTES_PER_S = 50e6
"""Less than half of what a link of 1 Gbit/s carries."""

_FIREWALL = (
    "Open all TCP ports between the hosts of the cluster (security group, firewall): ranks listen on ports that the "
    "kernel chooses."
)


def judge_network(surveys: Sequence[Survey], names: Mapping[int, str]) -> list[Finding]:
    """Return what is to be said of the network.

    Args:
        surveys: of all ranks, in order.
        names: what each host is called, by its number.
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
                findings.append(_rate(names, hosts, (first, second), by, bytes_per_s, round_trip_s))
    failures = list(dict.fromkeys(survey["failure"] for survey in surveys if survey["failure"]))
    findings += [
        Finding(check="transfer", where="all ranks", status=BAD, found=failure, advice=_FIREWALL)
        for failure in failures[:1]
    ]
    return findings


def _reach(source: str, target: str, attempts: Sequence[Sequence[str]]) -> Finding:
    reached = [f"{name} {address}" for name, address, failure in attempts if not failure]
    missed = [f"{name} {address}" for name, address, failure in attempts if failure]
    where = f"{source} to {target}"
    not_reached = f"; not {', '.join(missed)}" if missed else ""
    if reached:
        # An address that is not reached costs a quarter of a second, once.
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


def _rate(
    names: Mapping[int, str],
    hosts: Sequence[int],
    pair: tuple[int, int],
    by: str,
    bytes_per_s: float,
    round_trip_s: float,
) -> Finding:
    first, second = (names[hosts[rank]] for rank in pair)
    found = f"{bytes_per_s / 1e6:,.0f} MB/s, {round_trip_s * 1e6:,.0f} us for a barrier"
    if by != "TCP":
        return Finding(check="transfer", where=first, status=GOOD, found=f"{found}, between two of its ranks")
    is_slow = bytes_per_s < _SLOW_BYTES_PER_S
    return Finding(
        check="transfer",
        where=f"{first} to {second}",
        status=NOTE if is_slow else GOOD,
        found=f"{found}, by TCP",
        advice=f"That is slow for training: {size(100 << 20)} of gradients take {(100 << 20) / bytes_per_s:.1f} s. "
        "Look at which interface is used, and who else uses it; wire='bfloat16' halves what is sent."
        if is_slow
        else "",
    )
