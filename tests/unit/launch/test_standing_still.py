"""Ranks that stand still, or do not end when they are told to."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from sparkdl.launch.forkserver import forked_rank
from sparkdl.launch.task import supervisor as rank_supervisor
from sparkdl.launch.wire.outcome import RankSigns, StopReason
from tests.collective.eventually import eventually
from tests.processes import wait_until_gone
from tests.unit.launch.supervised_rank import supervised


def test_rank_that_does_not_heed_the_end_of_the_others_is_told_with_its_stack() -> None:
    def dream(context: Any) -> None:
        context.report({"number": 1})
        threading.Event().wait(600)

    with supervised(dream) as (supervisor, _, events):
        assert eventually(lambda: bool(events) and supervisor.signs().silent_s < 60, timeout_s=30)
        supervisor.stop(StopReason("rank 1 failed"))
        failure = supervisor.wait()
    assert failure is not None
    assert "in dream" in failure.stack
    assert not failure.is_hang


def test_rank_whose_end_is_not_seen_in_time_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_rank, "KILL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(rank_supervisor, "ABORT_GRACE_S", 0.2)
    monkeypatch.setattr(rank_supervisor, "LAST_LINES_TIMEOUT_S", 0.2)

    def stop_what_it_was_forked_from(context: Any) -> None:
        os.kill(os.getppid(), signal.SIGSTOP)  # nobody tells of its end then, as of a process that has none
        context.report({"parent": os.getppid()})
        threading.Event().wait(600)

    with supervised(stop_what_it_was_forked_from) as (supervisor, lines, events):
        assert eventually(lambda: bool(events), timeout_s=30)
        parent = events[0]["parent"]
        try:
            supervisor.stop(StopReason("rank 1 failed"))
            failure = supervisor.wait()
        finally:
            os.kill(parent, signal.SIGCONT)
    assert failure is not None
    assert failure.error == "rank 1 failed"
    assert "could not be ended" in lines[-1]
    assert wait_until_gone([parent], 20) == []


def test_rank_that_is_done_with_its_steps_is_no_longer_told_to_be_idle(tmp_path: Path) -> None:
    def train_and_write(context: Any) -> None:
        context.progress()
        while not (tmp_path / "trained").exists():
            threading.Event().wait(0.02)
        context.progress(done=True)
        threading.Event().wait(600)

    with supervised(train_and_write) as (supervisor, _, _):
        assert eventually(lambda: supervisor.signs().idle_s is not None, timeout_s=30)
        (tmp_path / "trained").touch()
        assert eventually(lambda: supervisor.signs().idle_s is None, timeout_s=30)
        assert not supervisor.signs().state, "it lives"


def sleep_in_python(context: Any) -> None:
    context.report({"here": 1})
    threading.Event().wait(600)


def spin(context: Any) -> None:
    context.report({"here": 1})
    while True:
        pass


def sleep_with_pythons_lock(context: Any) -> None:
    context.report({"here": 1})
    ctypes.PyDLL(None).sleep(600)


def be_stopped(context: Any) -> None:
    context.report({"here": 1})
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait(600)  # as it goes on where any of its threads may write the stacks


@pytest.mark.parametrize("function", [sleep_in_python, spin, sleep_with_pythons_lock, be_stopped])
def test_rank_that_hangs_anywhere_tells_its_python_stack_and_ends(function: Any) -> None:
    with supervised(function) as (supervisor, _, events):
        assert eventually(lambda: bool(events), timeout_s=30)
        if function in (sleep_with_pythons_lock, be_stopped):
            assert eventually(lambda: supervisor.signs().silent_s > 1.2, timeout_s=30)
        if function is be_stopped:
            assert eventually(lambda: supervisor.signs().state == "is stopped, as by SIGSTOP", timeout_s=30)
        supervisor.stop(StopReason("rank 0 hangs", is_hang=True))
        failure = supervisor.wait()
    assert failure is not None
    assert failure.is_hang
    assert failure.is_consequence
    head, frame = failure.stack.splitlines()[:2]
    assert head == "Thread MainThread (most recent call first):"
    assert f"in {function.__name__}" in failure.stack, frame
    assert wait_until_gone([supervisor.pid], 5) == []


def test_signs_of_a_rank_tell_that_it_lives_and_since_when_it_told_of_no_progress(
    tmp_path: Path,
) -> None:
    def go_on(context: Any) -> None:
        context.report({"here": 1})
        while not (tmp_path / "seen").exists():
            threading.Event().wait(0.02)
        context.progress()
        threading.Event().wait(600)

    with supervised(go_on) as (supervisor, _, events):
        assert eventually(lambda: bool(events), timeout_s=30)
        assert supervisor.signs().idle_s is None
        (tmp_path / "seen").touch()
        assert eventually(lambda: (supervisor.signs().idle_s or 0.0) > 0.6, timeout_s=30)
        signs = supervisor.signs()
        assert signs.silent_s < 5.0
        assert signs.state == ""
        assert signs.waits == ()


def test_rank_that_has_returned_owes_no_sign_of_life() -> None:
    with supervised(lambda context: 1) as (supervisor, _, _):
        assert supervisor.wait() is None
        assert not threading.Event().wait(0.3)
        assert supervisor.signs() == RankSigns(), "its task may wait for the others for hours"


def test_rank_whose_task_is_slow_to_take_its_word_is_not_taken_for_silent() -> None:
    goes_on = threading.Event()

    def speak(context: Any) -> None:
        context.report({"number": 1})

    taken = threading.Event()

    def be_slow(event: dict[str, Any]) -> None:
        taken.set()
        goes_on.wait(30)

    with supervised(speak, on_event=be_slow) as (supervisor, _, _):
        assert taken.wait(30)
        assert not goes_on.wait(1.0)
        assert supervisor.signs().silent_s == 0.0
        goes_on.set()
        assert supervisor.wait() is None
