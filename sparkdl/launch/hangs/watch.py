"""Decides whether a rank hangs, and which. Runs on the driver; in a barrier task where that is out of reach.

A rank hangs that does not answer, that others wait for, or that said it would tell of its progress and does not. Who
computes for hours and keeps nobody waiting does not hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sparkdl.collective.telemetry.stalls import Wait
from sparkdl.errors import ParamError
from sparkdl.launch.rank.pulse import PULSE_S
from sparkdl.launch.wire.outcome import RankSigns
from sparkdl.topology import name_ranks

_SHARE_OF_DEADLINE = 0.8
"""A hang is found before the operations that wait for it miss their deadline, and then tell of themselves alone."""

MIN_HANG_TIMEOUT_S = 4 * PULSE_S
"""In less time a rank that lives may well give no sign of it, as where many processes share a machine's cores."""

_LONGEST_LOOK_S = 3.0
"""Whoever looks less often than this was held up itself, and forgives as much."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """One finding.

    Attributes:
        culprits: the ranks that stand still, by number; those of a deadlock, or of a cut network, are all that wait.
        why: from what it is seen, in words.
        is_in_code: whether what the ranks run is to blame for certain, and would stand still again.
    """

    culprits: tuple[int, ...]
    why: str
    is_in_code: bool = False


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """From when on something counts.

    Attributes:
        hang_timeout_s: seconds without progress, or in an operation.
        operation_timeout_s: deadline of operations that were given none of their own; what was given a longer one may
            take as long.
        silence_timeout_s: seconds without a sign of life.
    """

    hang_timeout_s: float
    operation_timeout_s: float
    silence_timeout_s: float


def hang_limits(
    hang_timeout_s: float | None, operation_timeout_s: float, silence_timeout_s: float | None
) -> HangLimits:
    """Make the limits of what was given.

    Raises:
        ParamError: if a time to a hang is too short.
    """
    hang_timeout_s = check_hang_timeout(hang_timeout_s, operation_timeout_s)
    if silence_timeout_s is not None:
        check_hang_timeout(silence_timeout_s, operation_timeout_s, "silence_timeout_s")
    return HangLimits(
        hang_timeout_s=hang_timeout_s,
        operation_timeout_s=operation_timeout_s,
        silence_timeout_s=hang_timeout_s if silence_timeout_s is None else silence_timeout_s,
    )


def check_hang_timeout(
    hang_timeout_s: float | None,
    operation_timeout_s: float,
    name: str = "hang_timeout_s (hangTimeoutSeconds of a fit)",
) -> float:
    """Return the time after which a rank counts as hanging, by default a share of the operations' deadline.

    Raises:
        ParamError: if it is shorter than :data:`MIN_HANG_TIMEOUT_S`.
    """
    if hang_timeout_s is None:
        return max(MIN_HANG_TIMEOUT_S, _SHARE_OF_DEADLINE * operation_timeout_s)
    if not hang_timeout_s >= MIN_HANG_TIMEOUT_S:
        raise ParamError(
            f"{name} must be at least {MIN_HANG_TIMEOUT_S:g} s, in which a rank "
            f"gives four signs of life, or math.inf for never; got {hang_timeout_s:g}."
        )
    return hang_timeout_s


def find_hang(
    signs: Mapping[int, RankSigns], limits: HangLimits, unheard_s: Mapping[int, float] | None = None
) -> Hang | None:
    """Return what stands still by now, the likeliest cause of everything else first.

    Args:
        signs: of the ranks that are known, by rank.
        limits: from when on something counts.
        unheard_s: how long nothing has been heard of the ranks' tasks.
    """
    limit_s = limits.hang_timeout_s
    lost = {rank: s for rank, s in (unheard_s or {}).items() if s >= limits.silence_timeout_s}
    if lost:
        return Hang(
            culprits=tuple(sorted(lost)),
            why=f"nothing has been heard of {_possessive(lost)} for {max(lost.values()):.0f} s: its Python worker or "
            "its host stands still, or the network to it is cut",
        )
    silent = {rank: sign for rank, sign in signs.items() if sign.silent_s >= limits.silence_timeout_s}
    if silent:
        rank, sign = min(silent.items())
        how = (
            f"the process {sign.state}" if sign.state else "code outside Python holds Python's lock (the GIL)"
        )
        return Hang(
            culprits=tuple(sorted(silent)),
            why=f"the process of rank {rank} has given no sign of life for {sign.silent_s:.0f} s: {how}",
        )
    stalled = {
        rank: [wait for wait in sign.waits if _counts(wait, limits)] for rank, sign in sorted(signs.items())
    }
    stalled = {rank: waits for rank, waits in stalled.items() if waits}
    if stalled:
        return _of_waits(stalled, signs)
    idle = {
        rank: sign.idle_s
        for rank, sign in signs.items()
        if sign.idle_s is not None and sign.idle_s >= limit_s and not sign.waits
    }
    if idle:
        why = f"{name_ranks(sorted(idle))} told of no progress for {max(idle.values()):.0f} s"
        return Hang(culprits=tuple(sorted(idle)), why=why, is_in_code=True)
    return None


def _possessive(ranks: Iterable[int]) -> str:
    named = sorted(ranks)
    return f"the task of rank {named[0]}" if len(named) == 1 else f"the tasks of {name_ranks(named)}"


def _counts(wait: Wait, limits: HangLimits) -> bool:
    return wait.waited_s >= limits.hang_timeout_s and wait.timeout_s <= limits.operation_timeout_s


def _of_waits(stalled: Mapping[int, list[Wait]], signs: Mapping[int, RankSigns]) -> Hang:
    """Find who is waited for: a rank that does not wait itself; if there is none, they wait for each other."""
    missing: set[int] = set()
    for waits in stalled.values():
        for wait in waits:
            there = {
                rank
                for rank, sign in signs.items()
                if any(
                    (other.communicator, other.ranks) == (wait.communicator, wait.ranks)
                    for other in sign.waits
                )
            }
            missing |= set(wait.ranks) - there
    first, waits = next(iter(stalled.items()))
    wait = waits[0]
    waiting = f"{_has(stalled)} waited {wait.waited_s:.0f} s in {wait.operation} on {wait.communicator!r}"
    culprits = tuple(sorted(rank for rank in missing if rank not in signs or not signs[rank].waits))
    if culprits:
        return Hang(culprits=culprits, why=f"{waiting} for {name_ranks(culprits)}")
    if missing:
        waiting_ranks = tuple(sorted(rank for rank, sign in signs.items() if sign.waits))
        return Hang(
            culprits=waiting_ranks,
            why=f"{waiting}, and {name_ranks(waiting_ranks)} wait for each other: their orders of operations differ",
            is_in_code=True,
        )
    return Hang(
        culprits=(first,),
        why=f"{waiting}, in which all its ranks are: nothing moves between them. Look at the network, and whether they "
        "ask for the same",
    )


def _has(ranks: Iterable[int]) -> str:
    named = sorted(ranks)
    return f"{name_ranks(named)} {'has' if len(named) == 1 else 'have'}"


class HangWatch:
    """Looks again and again, and is sure only when what it sees is there twice, in newer signs.

    Args:
        limits: from when on something counts.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._looked_at: float | None = None
        self._not_before = 0.0
        self._suspicion: tuple[Hang, dict[int, int]] | None = None

    def look(self, now: float, heard: Mapping[int, tuple[float, int, RankSigns]]) -> Hang | None:
        """Return what hangs.

        Args:
            now: the time, as of ``time.monotonic()``.
            heard: when each rank's task was last heard of, the number of the signs that it told, and these.
        """
        if self._looked_at is not None and now - self._looked_at > _LONGEST_LOOK_S:
            self._not_before = now  # who looks was held up, and may have heard of nothing meanwhile
        self._looked_at = now
        unheard_s = {rank: now - max(at, self._not_before) for rank, (at, _, _) in heard.items()}
        signs = {rank: sign for rank, (_, _, sign) in heard.items()}
        hang = find_hang(signs, self._limits, unheard_s)
        if hang is None:
            self._suspicion = None
            return None
        numbers = {rank: number for rank, (_, number, _) in heard.items()}
        if self._suspicion is None or self._suspicion[0].culprits != hang.culprits:
            self._suspicion = hang, numbers
            return None
        before = self._suspicion[1]
        is_sure = all(
            number > before.get(rank, number) or unheard_s[rank] >= self._limits.silence_timeout_s
            for rank, number in numbers.items()
        )
        return hang if is_sure else None
