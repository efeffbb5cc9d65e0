"""Decides whether a rank hangs, and which. Runs on the driver, or in a barrier task that cannot reach the driver.

A rank hangs if its process does not respond, if other ranks wait for it in an operation, or if it has reported
progress before and no longer does. A rank that computes for hours and keeps no other rank waiting does not hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from sparkdl.collective import check_timeout
from sparkdl.collective.telemetry.stalls import Wait
from sparkdl.errors import ParamError
from sparkdl.launch.wire.messages import HEARTBEAT_S
from sparkdl.launch.wire.outcome import HealthReport, RankHealth
from sparkdl.launch.wire.spec import HangLimits
from sparkdl.topology import name_ranks

_SHARE_OF_DEADLINE = 0.8
"""Share of the operations' deadline after which a hang is detected: an operation that misses its deadline would raise
an error that hides the cause."""

MIN_HANG_TIMEOUT_S = 4 * HEARTBEAT_S
"""Shortest hang timeout: in less time a healthy rank may miss its heartbeats, for example if many processes share a
machine's cores."""

_MAX_GAP_S = 3.0
"""Longest gap between two observations: after a longer one, the observer itself was blocked and does not count that
time."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A detected hang.

    Attributes:
        culprits: numbers of the hanging ranks; in a deadlock all waiting ranks; if no data moves between ranks that
            have all called an operation, the first of them.
        why: description of how the hang was detected.
        is_in_code: whether the function that the ranks run is certainly the cause, and would hang again.
        health: health of the ranks, by rank, as far as known.
    """

    culprits: tuple[int, ...]
    why: str
    is_in_code: bool = False
    health: Mapping[int, RankHealth] = field(default_factory=dict, compare=False)


def hang_limits(
    hang_timeout_s: float | None, operation_timeout_s: float, silence_timeout_s: float | None = None
) -> HangLimits:
    """Make the limits; by default a rank hangs after a share of the operations' deadline.

    Raises:
        ParamError: if a timeout is shorter than :data:`MIN_HANG_TIMEOUT_S`, or that of operations is not positive.
    """
    check_timeout(operation_timeout_s, "operation_timeout_s")
    timeouts = {
        "hang_timeout_s (hangTimeoutSeconds of a fit)": hang_timeout_s,
        "silence_timeout_s": silence_timeout_s,
    }
    for name, timeout_s in timeouts.items():
        if timeout_s is not None and not timeout_s >= MIN_HANG_TIMEOUT_S:
            raise ParamError(
                f"{name} must be at least {MIN_HANG_TIMEOUT_S:g} s, in which a rank "
                f"sends four heartbeats, or math.inf for never; got {timeout_s:g}."
            )
    if hang_timeout_s is None:
        hang_timeout_s = max(MIN_HANG_TIMEOUT_S, _SHARE_OF_DEADLINE * operation_timeout_s)
    return HangLimits(
        hang_timeout_s=hang_timeout_s,
        operation_timeout_s=operation_timeout_s,
        silence_timeout_s=hang_timeout_s if silence_timeout_s is None else silence_timeout_s,
    )


def find_hang(
    health: Mapping[int, RankHealth], limits: HangLimits, task_silent_s: Mapping[int, float] | None = None
) -> Hang | None:
    """Detect a hang; conditions that are likely to cause the others are checked first.

    Args:
        health: health of the ranks, by rank, as far as known.
        limits: times after which a rank counts as hanging.
        task_silent_s: seconds since the last message of each rank's task, by rank.
    """
    lost = {rank: s for rank, s in (task_silent_s or {}).items() if s >= limits.silence_timeout_s}
    if lost:
        return Hang(
            culprits=tuple(sorted(lost)),
            why=f"there was no message from the task{'s' * (len(lost) > 1)} of {name_ranks(sorted(lost))} for "
            f"{max(lost.values()):.0f} s: its Python worker or its host hangs, or the network to it is cut",
        )
    silent = {rank: state for rank, state in health.items() if state.silent_s >= limits.silence_timeout_s}
    if silent:
        rank, first = min(silent.items())
        how = f"the process {first.state}" if first.state else "native code holds Python's lock (the GIL)"
        return Hang(
            culprits=tuple(sorted(silent)),
            why=f"the process of rank {rank} has sent no heartbeat for {first.silent_s:.0f} s: {how}",
        )
    stalled: dict[int, list[Wait]] = {}
    for rank, state in sorted(health.items()):
        for wait in state.waits:
            if wait.waited_s >= limits.hang_timeout_s and wait.timeout_s <= limits.operation_timeout_s:
                stalled.setdefault(rank, []).append(wait)
    if stalled:
        return _hang_of_waits(stalled, health)
    idle = {
        rank: state.idle_s
        for rank, state in health.items()
        if state.idle_s is not None and state.idle_s >= limits.hang_timeout_s and not state.waits
    }
    if idle:
        why = f"{_has(idle)} reported no progress for {max(idle.values()):.0f} s"
        return Hang(culprits=tuple(sorted(idle)), why=why, is_in_code=True)
    return None


def _hang_of_waits(stalled: Mapping[int, list[Wait]], health: Mapping[int, RankHealth]) -> Hang:
    """Find the ranks that others wait for and that do not wait themselves; if none, the ranks wait for each other."""
    missing: set[int] = set()
    for waits in stalled.values():
        for wait in waits:
            present = {
                rank
                for rank, state in health.items()
                if any(
                    (other.communicator, other.ranks) == (wait.communicator, wait.ranks)
                    for other in state.waits
                )
            }
            missing |= set(wait.ranks) - present
    first, waits = next(iter(stalled.items()))
    wait = waits[0]
    alike = [rank for rank, waits in stalled.items() if _place_of(wait) in map(_place_of, waits)]
    waiting = f"{_has(alike)} waited {wait.waited_s:.0f} s in {wait.operation} on {wait.communicator!r}"
    culprits = tuple(sorted(rank for rank in missing if rank not in health or not health[rank].waits))
    if culprits:
        return Hang(culprits=culprits, why=f"{waiting} for {name_ranks(culprits)}")
    if missing:
        waiting_ranks = tuple(sorted(rank for rank, state in health.items() if state.waits))
        return Hang(
            culprits=waiting_ranks,
            why=f"{waiting}, and {name_ranks(waiting_ranks)} wait for each other: they call operations in different "
            "orders",
            is_in_code=True,
        )
    return Hang(
        culprits=(first,),
        why=f"{waiting}, which all its ranks have called, and no data moves between them. Look at the network, and "
        "whether the ranks pass matching arguments",
    )


def _place_of(wait: Wait) -> tuple[str, str]:
    return wait.operation, wait.communicator


def _has(ranks: Iterable[int]) -> str:
    named = sorted(ranks)
    return f"{name_ranks(named)} {'has' if len(named) == 1 else 'have'}"


class HangWatch:
    """Detects a hang from repeated observations: the same ranks must hang in two successive reports.

    Args:
        limits: times after which a rank counts as hanging.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._observed_at: float | None = None
        self._not_before = 0.0
        self._suspicion: tuple[Hang, dict[int, int]] | None = None

    def observe(self, now: float, reports: Mapping[int, HealthReport]) -> Hang | None:
        """Return the hang once it is certain, otherwise None.

        Args:
            now: current time of ``time.monotonic()``.
            reports: latest report on each rank, by rank.
        """
        if self._observed_at is not None and now - self._observed_at > _MAX_GAP_S:
            self._not_before = now  # the observer was blocked, and may not have received anything meanwhile
        self._observed_at = now
        task_silent_s = {
            rank: now - max(report.received_at, self._not_before) for rank, report in reports.items()
        }
        health = {rank: report.health for rank, report in reports.items()}
        hang = find_hang(health, self._limits, task_silent_s)
        if hang is None:
            self._suspicion = None
            return None
        numbers = {rank: report.number for rank, report in reports.items()}
        if self._suspicion is None or self._suspicion[0].culprits != hang.culprits:
            self._suspicion = hang, numbers
            return None
        before = self._suspicion[1]
        is_certain = all(
            number > before.get(rank, number) or task_silent_s[rank] >= self._limits.silence_timeout_s
            for rank, number in numbers.items()
        )
        return replace(hang, health=health) if is_certain else None
