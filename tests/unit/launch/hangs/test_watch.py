"""Finding the hanging ranks from the health of all ranks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.collective.telemetry.stalls import Wait
from sparkdl.errors import ParamError
from sparkdl.launch.hangs.watch import Hang, HangWatch, find_hang, hang_limits
from sparkdl.launch.wire.outcome import HealthReport, RankHealth
from sparkdl.launch.wire.spec import HangLimits

LIMITS = HangLimits(hang_timeout_s=10.0, operation_timeout_s=60.0, silence_timeout_s=10.0)
NEVER = HangLimits(hang_timeout_s=math.inf, operation_timeout_s=60.0, silence_timeout_s=math.inf)


def waiting(*ranks: int, s: float = 11.0, on: str = "world", timeout_s: float = 60.0) -> RankHealth:
    return RankHealth(waits=(Wait(on, ranks, "allreduce 'w'", s, timeout_s),))


def test_rank_that_the_others_wait_for_is_the_culprit() -> None:
    health = {0: waiting(0, 1, 2), 1: RankHealth(), 2: waiting(0, 1, 2)}
    hang = find_hang(health, LIMITS)
    assert hang == Hang(
        culprits=(1,), why="ranks 0, 2 have waited 11 s in allreduce 'w' on 'world' for rank 1"
    )


def test_rank_that_waits_for_the_culprit_in_another_process_set_is_no_culprit() -> None:
    health = {0: waiting(0, 1, 2), 1: waiting(1, 2, on="world/pair"), 2: RankHealth()}
    assert find_hang(health, LIMITS).culprits == (2,)


def test_rank_outside_the_process_set_is_no_culprit() -> None:
    health = {0: waiting(0, 1, on="world/pair"), 1: RankHealth(), 2: RankHealth()}
    assert find_hang(health, LIMITS).culprits == (1,)


def test_ranks_that_wait_for_each_other_are_all_culprits() -> None:
    health = {0: waiting(0, 1, on="world/a"), 1: waiting(0, 1, on="world/b")}
    hang = find_hang(health, LIMITS)
    assert hang.culprits == (0, 1)
    assert "ranks 0, 1 wait for each other" in hang.why
    assert hang.is_in_code


def test_only_the_ranks_in_an_operation_are_said_to_wait_in_it() -> None:
    health = {0: waiting(0, 1, on="world/a"), 1: waiting(0, 1, on="world/b"), 2: waiting(0, 1, 2)}
    why = find_hang(health, LIMITS).why
    assert why.startswith("rank 0 has waited 11 s in allreduce 'w' on 'world/a', and ranks 0-2 wait")


def test_operation_that_all_ranks_have_called_hangs_because_of_the_network() -> None:
    hang = find_hang({0: waiting(0, 1), 1: waiting(0, 1)}, LIMITS)
    assert "no data moves between them" in hang.why


def test_operation_with_its_own_longer_deadline_is_no_hang_before_it() -> None:
    assert find_hang({0: waiting(0, 1, timeout_s=7200.0), 1: RankHealth()}, LIMITS) is None


def test_silent_process_is_named_with_its_state_in_the_kernel() -> None:
    health = {0: waiting(0, 1), 1: RankHealth(silent_s=12.0, state="is stopped, as by SIGSTOP")}
    hang = find_hang(health, LIMITS)
    assert hang.culprits == (1,)
    assert "for 12 s: the process is stopped, as by SIGSTOP" in hang.why
    assert "holds Python's lock" in find_hang({0: RankHealth(silent_s=12.0)}, LIMITS).why


def test_silent_task_is_the_most_likely_cause() -> None:
    health = {0: waiting(0, 1), 1: RankHealth()}
    hang = find_hang(health, LIMITS, {0: 0.1, 1: 13.0})
    assert hang.culprits == (1,)
    assert not hang.is_in_code
    assert "no message from the task of rank 1 for 13 s" in hang.why


def test_silence_timeout_may_be_shorter_than_the_hang_timeout() -> None:
    patient = HangLimits(hang_timeout_s=3600.0, operation_timeout_s=3600.0, silence_timeout_s=10.0)
    assert find_hang({0: waiting(0, 1, s=600.0), 1: RankHealth()}, patient, {0: 1.0, 1: 1.0}) is None
    for sign, unheard_s in ((RankHealth(silent_s=11.0), 1.0), (RankHealth(), 11.0)):
        assert find_hang({0: waiting(0, 1, s=600.0), 1: sign}, patient, {0: 1.0, 1: unheard_s}).culprits == (
            1,
        )


def test_only_a_rank_that_has_reported_progress_can_be_idle() -> None:
    assert find_hang({0: RankHealth()}, LIMITS) is None
    assert find_hang({0: RankHealth(idle_s=9.0)}, LIMITS) is None
    hang = find_hang({0: RankHealth(idle_s=11.0), 1: waiting(0, 1, s=1.0)}, LIMITS)
    assert hang == Hang(culprits=(0,), why="rank 0 has reported no progress for 11 s", is_in_code=True)


HEALTH = st.builds(
    RankHealth,
    silent_s=st.floats(0, 9.9),
    idle_s=st.none() | st.floats(0, 9.9),
    waits=st.lists(
        st.builds(
            Wait, st.just("world"), st.just((0, 1, 2)), st.just("barrier"), st.floats(0, 9.9), st.just(60.0)
        ),
        max_size=2,
    ).map(tuple),
)


@given(st.dictionaries(st.integers(0, 2), HEALTH))
def test_nothing_hangs_before_the_limits(health: dict[int, RankHealth]) -> None:
    assert find_hang(health, LIMITS, dict.fromkeys(health, 9.9)) is None
    assert find_hang(health, NEVER) is None


@given(HEALTH)
def test_health_survives_json(health: RankHealth) -> None:
    assert RankHealth.from_fields(json.loads(json.dumps(asdict(health)))) == health


def test_watch_is_certain_after_a_newer_report() -> None:
    watch = HangWatch(LIMITS)
    hanging = {0: waiting(0, 1), 1: RankHealth()}

    def reports(number: int) -> dict[int, HealthReport]:
        return {rank: HealthReport(0.0, number, health) for rank, health in hanging.items()}

    assert watch.observe(0.0, reports(1)) is None
    assert watch.observe(0.1, reports(1)) is None, "the same reports prove nothing new"
    hang = watch.observe(0.2, reports(2))
    assert (hang.culprits, hang.health) == ((1,), hanging)


def test_watch_drops_a_suspicion_that_did_not_last() -> None:
    watch = HangWatch(LIMITS)
    for number, health in enumerate([waiting(0, 1), RankHealth(), waiting(0, 1)]):
        now = 0.1 * number
        reports = {0: HealthReport(now, number, health), 1: HealthReport(now, number, RankHealth())}
        assert watch.observe(now, reports) is None


def test_driver_that_was_blocked_itself_finds_no_hang() -> None:
    watch = HangWatch(LIMITS)
    reports = {0: HealthReport(0.0, 1, RankHealth())}
    assert watch.observe(0.0, reports) is None
    # As in a debugger, or while a notebook cell prints for a minute: messages wait in the socket.
    assert watch.observe(60.0, reports) is None
    times = [60.5 + 0.5 * n for n in range(18)]
    assert [watch.observe(now, reports) for now in times] == [None] * len(times)
    watch.observe(70.1, reports)
    assert watch.observe(70.6, reports) is not None


def test_hang_timeout_defaults_to_a_share_of_the_deadline() -> None:
    assert hang_limits(None, 300.0).hang_timeout_s == hang_limits(None, 300.0).silence_timeout_s == 240.0
    assert hang_limits(5.0, 300.0).hang_timeout_s == 5.0
    assert hang_limits(math.inf, 300.0).hang_timeout_s == math.inf
    assert hang_limits(None, 1.0).hang_timeout_s == 2.0, "a healthy rank sends heartbeats within"
    for wrong in (0.0, -1.0, 1.9, math.nan):
        with pytest.raises(ParamError, match="hang_timeout_s .* must be at least 2 s"):
            hang_limits(wrong, 300.0)


def test_waits_of_an_earlier_world_make_no_rank_of_the_next_one_hang() -> None:
    """Its ranks had other numbers: rank 2 may not exist any more."""
    before = RankHealth(waits=waiting(0, 1, 2).waits, idle_s=100.0, world=3)
    assert find_hang({0: before, 1: before}, LIMITS) is not None
    health = {rank: before.within(4) for rank in (0, 1)}
    assert find_hang(health, LIMITS) is None
    assert before.within(3) is before
    frozen = RankHealth(silent_s=100.0, state="is stopped, as by SIGSTOP", world=3).within(4)
    hang = find_hang({0: RankHealth(world=4), 1: frozen}, LIMITS)
    assert hang is not None
    assert hang.culprits == (1,)
