"""Which rank is taken to hang, by what the ranks tell of themselves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.collective.telemetry.stalls import Wait
from sparkdl.errors import ParamError
from sparkdl.launch.hangs.watch import Hang, HangLimits, HangWatch, check_hang_timeout, find_hang
from sparkdl.launch.wire.outcome import RankSigns

LIMITS = HangLimits(hang_timeout_s=10.0, operation_timeout_s=60.0, silence_timeout_s=10.0)
NEVER = HangLimits(hang_timeout_s=math.inf, operation_timeout_s=60.0, silence_timeout_s=math.inf)


def waiting(
    *ranks: int, s: float = 11.0, on: str = "world", what: str = "allreduce 'w'", timeout_s: float = 60.0
) -> RankSigns:
    return RankSigns(waits=(Wait(on, ranks, what, s, timeout_s),))


def test_rank_that_the_others_wait_for_is_the_culprit() -> None:
    signs = {0: waiting(0, 1, 2), 1: RankSigns(), 2: waiting(0, 1, 2)}
    hang = find_hang(signs, LIMITS)
    assert hang == Hang(
        culprits=(1,), why="ranks 0, 2 have waited 11 s in allreduce 'w' on 'world' for rank 1"
    )


def test_rank_that_waits_for_the_culprit_elsewhere_is_none() -> None:
    signs = {0: waiting(0, 1, 2), 1: waiting(1, 2, on="world/pair"), 2: RankSigns()}
    hang = find_hang(signs, LIMITS)
    assert hang is not None
    assert hang.culprits == (2,)


def test_rank_outside_the_process_set_is_no_culprit() -> None:
    signs = {0: waiting(0, 1, on="world/pair"), 1: RankSigns(), 2: RankSigns()}
    hang = find_hang(signs, LIMITS)
    assert hang is not None
    assert hang.culprits == (1,)


def test_ranks_that_wait_for_each_other_are_told_so() -> None:
    signs = {0: waiting(0, 1, on="world/a"), 1: waiting(0, 1, on="world/b")}
    hang = find_hang(signs, LIMITS)
    assert hang is not None
    assert hang.culprits == (0, 1)
    assert "ranks 0, 1 wait for each other" in hang.why
    assert hang.is_in_code


def test_operation_that_all_have_joined_is_a_matter_of_the_network() -> None:
    hang = find_hang({0: waiting(0, 1), 1: waiting(0, 1)}, LIMITS)
    assert hang is not None
    assert "nothing moves between them" in hang.why


def test_operation_with_a_longer_deadline_of_its_own_may_take_as_long() -> None:
    assert find_hang({0: waiting(0, 1, timeout_s=7200.0), 1: RankSigns()}, LIMITS) is None


def test_silent_process_is_named_with_what_the_kernel_says_of_it() -> None:
    signs = {0: waiting(0, 1), 1: RankSigns(silent_s=12.0, state="is stopped, as by SIGSTOP")}
    hang = find_hang(signs, LIMITS)
    assert hang is not None
    assert hang.culprits == (1,)
    assert "no sign of life for 12 s: the process is stopped, as by SIGSTOP" in hang.why
    holds = find_hang({0: RankSigns(silent_s=12.0)}, LIMITS)
    assert holds is not None
    assert "holds Python's lock" in holds.why


def test_task_that_is_not_heard_of_goes_before_all_else() -> None:
    signs = {0: waiting(0, 1), 1: RankSigns()}
    hang = find_hang(signs, LIMITS, {0: 0.1, 1: 13.0})
    assert hang is not None
    assert hang.culprits == (1,)
    assert not hang.is_in_code
    assert "nothing has been heard of the task of rank 1 for 13 s" in hang.why


def test_silence_can_count_sooner_than_a_wait() -> None:
    patient = HangLimits(hang_timeout_s=3600.0, operation_timeout_s=3600.0, silence_timeout_s=10.0)
    assert find_hang({0: waiting(0, 1, s=600.0), 1: RankSigns()}, patient, {0: 1.0, 1: 1.0}) is None
    for sign, unheard_s in ((RankSigns(silent_s=11.0), 1.0), (RankSigns(), 11.0)):
        hang = find_hang({0: waiting(0, 1, s=600.0), 1: sign}, patient, {0: 1.0, 1: unheard_s})
        assert hang is not None
        assert hang.culprits == (1,)


def test_only_a_rank_that_tells_of_progress_is_held_to_it() -> None:
    assert find_hang({0: RankSigns()}, LIMITS) is None
    assert find_hang({0: RankSigns(idle_s=9.0)}, LIMITS) is None
    hang = find_hang({0: RankSigns(idle_s=11.0), 1: waiting(0, 1, s=1.0)}, LIMITS)
    assert hang == Hang(culprits=(0,), why="rank 0 told of no progress for 11 s", is_in_code=True)


SIGNS = st.builds(
    RankSigns,
    silent_s=st.floats(0, 9.9),
    idle_s=st.none() | st.floats(0, 9.9),
    waits=st.lists(
        st.builds(
            Wait, st.just("world"), st.just((0, 1, 2)), st.just("barrier"), st.floats(0, 9.9), st.just(60.0)
        ),
        max_size=2,
    ).map(tuple),
)


@given(st.dictionaries(st.integers(0, 2), SIGNS))
def test_nothing_hangs_before_its_time(signs: dict[int, RankSigns]) -> None:
    assert find_hang(signs, LIMITS, dict.fromkeys(signs, 9.9)) is None
    assert find_hang(signs, NEVER) is None


@given(SIGNS)
def test_signs_come_back_as_they_were_sent(signs: RankSigns) -> None:
    import json

    assert RankSigns.from_fields(json.loads(json.dumps(signs.to_fields()))) == signs


def test_watch_is_sure_when_newer_signs_say_the_same() -> None:
    watch = HangWatch(LIMITS)
    hanging = {0: waiting(0, 1), 1: RankSigns()}

    def heard(number: int) -> dict[int, tuple[float, int, RankSigns]]:
        return {rank: (0.0, number, signs) for rank, signs in hanging.items()}

    assert watch.look(0.0, heard(1)) is None
    assert watch.look(0.1, heard(1)) is None, "the same signs say nothing new"
    found = watch.look(0.2, heard(2))
    assert found is not None
    assert found.culprits == (1,)


def test_watch_forgets_a_suspicion_that_did_not_last() -> None:
    watch = HangWatch(LIMITS)
    assert watch.look(0.0, {0: (0.0, 1, waiting(0, 1)), 1: (0.0, 1, RankSigns())}) is None
    assert watch.look(0.1, {0: (0.1, 2, RankSigns()), 1: (0.1, 2, RankSigns())}) is None
    assert watch.look(0.2, {0: (0.2, 3, waiting(0, 1)), 1: (0.2, 3, RankSigns())}) is None


def test_driver_that_was_held_up_itself_blames_nobody() -> None:
    watch = HangWatch(LIMITS)
    heard = {0: (0.0, 1, RankSigns())}
    assert watch.look(0.0, heard) is None
    # A debugger, or a notebook whose cell prints for a minute: what the task said lies in the socket.
    assert watch.look(60.0, heard) is None
    times = [60.5 + 0.5 * n for n in range(18)]
    assert [watch.look(now, heard) for now in times] == [None] * len(times)
    watch.look(70.1, heard)
    assert watch.look(70.6, heard) is not None


def test_time_is_a_share_of_the_deadline_unless_it_is_given() -> None:
    assert check_hang_timeout(None, 300.0) == 240.0
    assert check_hang_timeout(5.0, 300.0) == 5.0
    assert check_hang_timeout(math.inf, 300.0) == math.inf
    assert check_hang_timeout(None, 1.0) == 2.0, "a rank that lives gives a sign of it within"
    for wrong in (0.0, -1.0, 1.9, math.nan):
        with pytest.raises(ParamError, match="hang_timeout_s .* must be at least 2 s"):
            check_hang_timeout(wrong, 300.0)
