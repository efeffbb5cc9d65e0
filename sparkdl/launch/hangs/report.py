"""What is told of ranks of which one stood still: the stack of each, and what it waited in. Runs on the driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from sparkdl.errors import HangError
from sparkdl.launch.hangs.watch import Hang, HangLimits, find_hang
from sparkdl.launch.wire.outcome import Failure, RankSigns
from sparkdl.topology import name_ranks

logger = logging.getLogger(__name__)

_NO_STACK = "  (no stack: its process or its task did not answer)"


def raise_hang(failures: Sequence[Failure], limits: HangLimits) -> None:
    """Raise that a rank hung, if that is why all were ended: whoever ended them may not have known of all of them.

    Raises:
        HangError: naming the rank.
    """
    first = next((failure for failure in failures if failure.is_hang), None)
    if first is None:
        return
    signs = {failure.rank: failure.signs for failure in failures if failure.signs is not None}
    hang = find_hang(signs, limits) or Hang(culprits=(first.rank,), why=first.error)
    raise hang_error(hang, failures, {}, {})


def hang_error(
    hang: Hang, failures: Sequence[Failure], signs: Mapping[int, RankSigns], hosts: Mapping[int, str]
) -> HangError:
    """Make the exception that names who stood still, and log where every rank was.

    Args:
        hang: what was found.
        failures: how the ranks were ended, as far as they told.
        signs: what was known of the ranks before; of those that told nothing.
        hosts: of the ranks.
    """
    ended = {failure.rank: failure for failure in reversed(failures) if failure.signs is not None}
    known = {**signs, **{rank: failure.signs for rank, failure in ended.items() if failure.signs is not None}}
    stacks = {rank: ended[rank].stack if rank in ended else "" for rank in sorted({*known, *hang.culprits})}
    places = {**hosts, **{failure.rank: failure.host for failure in failures if failure.host}}
    rank = hang.culprits[0]
    host = places.get(rank, "a host that is not known")
    report = _report(stacks, known, places)
    logger.error("%s", report)
    who = f"Rank {rank} on {host} hangs"
    if len(hang.culprits) > 1:
        who = f"{name_ranks(hang.culprits).capitalize()} hang, the first of them on {host}"
    stack = stacks[rank]
    where = f"\n\nRank {rank} was here:\n{stack}" if stack else ""
    return HangError(
        f"{who}, and all ranks were ended: {hang.why}. The log has the stacks of all ranks. If it may take that long, "
        f"raise hang_timeout_s (hangTimeoutSeconds of a fit).{where}",
        rank=rank,
        host=host,
        traceback_text=stack,
        report=report,
        is_in_code=hang.is_in_code,
    )


def _report(stacks: Mapping[int, str], signs: Mapping[int, RankSigns], hosts: Mapping[int, str]) -> str:
    """Where every rank was; ranks that were at the same place together."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, stack in stacks.items():
        what = _what(signs.get(rank))
        alike.setdefault((what, stack), []).append(rank)
    parts = []
    for (what, stack), ranks in alike.items():
        there = f" on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))}"
        parts.append(f"{name_ranks(ranks).capitalize()}{there}, {what}:\n{stack or _NO_STACK}")
    return "\n".join(parts)


def _what(signs: RankSigns | None) -> str:
    if signs is None:
        return "of which nothing was heard"
    silent = f", silent for {signs.silent_s:.0f} s" if signs.silent_s >= 2 else ""
    return f"{signs.in_words()}{silent}"
