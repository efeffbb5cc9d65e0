"""The report on hanging ranks: the Python stack of every rank, and the operations that it waited in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from sparkdl.errors import HangError
from sparkdl.launch.hangs.watch import Hang, find_hang
from sparkdl.launch.wire.outcome import Failure, RankHealth
from sparkdl.launch.wire.spec import HangLimits
from sparkdl.topology import group_ranks, name_ranks

logger = logging.getLogger(__name__)

_NO_STACK = "  (no stack: its process or its task did not answer)"


def raise_hang(failures: Sequence[Failure], limits: HangLimits) -> None:
    """Raise a ``HangError`` if the ranks were ended because one of them hung.

    A task that ended its rank for a hang may not have known of the other ranks, so the hang is determined again.

    Raises:
        HangError: if a rank hung; the error names it.
    """
    first = next((failure for failure in failures if failure.is_hang), None)
    if first is None:
        return
    health = {failure.rank: failure.health for failure in failures if failure.health is not None}
    hang = find_hang(health, limits) or Hang(culprits=(first.rank,), why=first.error)
    raise hang_error(hang, failures, {})


def hang_error(hang: Hang, failures: Sequence[Failure], hosts: Mapping[int, str]) -> HangError:
    """Make the exception that names the hanging ranks, and log where every rank was.

    Args:
        hang: the hang that was detected; its health of the ranks is used for those that reported no failure.
        failures: failures of the ranks, as far as they reported them.
        hosts: hosts of the ranks, by rank.
    """
    ended = {failure.rank: failure for failure in reversed(failures) if failure.health is not None}
    known = {
        **hang.health,
        **{rank: failure.health for rank, failure in ended.items() if failure.health is not None},
    }
    stacks = {rank: ended[rank].stack if rank in ended else "" for rank in sorted({*known, *hang.culprits})}
    known_hosts = {**hosts, **{failure.rank: failure.host for failure in failures if failure.host}}
    rank = hang.culprits[0]
    host = known_hosts.get(rank, "a host that is not known")
    report = _report(stacks, known, known_hosts)
    logger.error("%s", report)
    who = f"Rank {rank} on {host} hangs"
    if len(hang.culprits) > 1:
        who = f"{name_ranks(hang.culprits).capitalize()} hang, the first of them on {host}"
    stack = stacks[rank]
    where = f"\n\nRank {rank} was here:\n{stack}" if stack else ""
    return HangError(
        f"{who}, and all ranks were ended: {hang.why}. The log has the stacks of all ranks. If a rank may "
        f"take that long, raise hang_timeout_s (hangTimeoutSeconds of a fit).{where}",
        rank=rank,
        host=host,
        traceback_text=stack,
        report=report,
        is_in_code=hang.is_in_code,
    )


def _report(stacks: Mapping[int, str], health: Mapping[int, RankHealth], hosts: Mapping[int, str]) -> str:
    """Describe where every rank was; ranks with the same stack and state are described together."""
    alike = group_ranks((rank, (_describe(health.get(rank)), stack)) for rank, stack in stacks.items())
    parts = []
    for (state, stack), ranks in alike.items():
        there = f" on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))}"
        parts.append(f"{name_ranks(ranks).capitalize()}{there}, {state}:\n{stack or _NO_STACK}")
    return "\n".join(parts)


def _describe(health: RankHealth | None) -> str:
    if health is None:
        return "whose state is not known"
    silent = f", silent for {health.silent_s:.0f} s" if health.silent_s >= 2 else ""
    return f"{health.describe()}{silent}"
