from __future__ import annotations

import ctypes
import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from sparkdl.collective import Coordinator
from sparkdl.collective.authentication import new_secret
from sparkdl.errors import RankLostError
from sparkdl.launch import forked_rank, rank_supervisor
from sparkdl.launch.outcome import StopReason
from sparkdl.launch.packed_error import unpack_error
from sparkdl.launch.process_guard import ProcessGuard
from sparkdl.launch.rank_environment import rank_environment
from sparkdl.launch.rank_signs import RankSigns
from sparkdl.launch.rank_supervisor import RankSupervisor
from tests.collective.eventually import eventually
from tests.processes import wait_until_gone
from tests.unit.launch.orders import order_of_one


@contextmanager
def supervised(
    function: Any,
    *args: Any,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    before_begin: Callable[[list[str]], None] | None = None,
) -> Iterator[tuple[RankSupervisor, list[str], list[dict[str, Any]]]]:
    """One rank, with the lines and the events that it sends."""
    secret, lines, events = new_secret(), [], []
    has_line = threading.Event()

    def heard(line: str) -> None:
        lines.append(line)
        has_line.set()

    with (
        Coordinator(secret=secret, world_size=1, host="127.0.0.1") as coordinator,
        RankSupervisor(
            rank=0,
            payload=cloudpickle.dumps((function, args, {})),
            environment=rank_environment({}, gpus=None),
            on_line=heard,
            on_event=on_event or events.append,
        ) as supervisor,
    ):
        if before_begin is not None:
            assert has_line.wait(60)
            before_begin(lines)
        supervisor.begin(order_of_one(coordinator, secret))
        yield supervisor, lines, events


def value_of(supervisor: RankSupervisor) -> Any:
    supervisor.result.seek(0)
    return pickle.load(supervisor.result)


def test_a_rank_holds_no_credentials_of_the_process_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "DATABRICKS_TOKEN",
    )
    for name in names:
        monkeypatch.setenv(name, "a secret")

    def look(context: Any) -> tuple[list[str], bool]:
        with open("/proc/self/environ", "rb") as file:
            return [name for name in names if name in os.environ], b"a secret" in file.read()

    with supervised(look) as (supervisor, _, _):
        assert supervisor.wait() is None
        assert value_of(supervisor) == ([], False)


def test_value_lines_and_events_of_a_rank_arrive() -> None:
    def speak(context: Any, number: int) -> int:
        print("a line without an end", end="")
        context.report({"number": number})
        return number + 1

    with supervised(speak, 41) as (supervisor, lines, events):
        assert supervisor.wait() is None
        assert value_of(supervisor) == 42
    assert lines == ["a line without an end"]
    assert events == [{"number": 41}]


class SpeaksWhenUnpickled:
    def __reduce__(self) -> Any:
        return print, ("imported",)


class CannotBeUnpickled:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_function_is_unpickled_before_the_rank_learns_its_place_and_called_after_it() -> None:
    def speak(context: Any, _: Any) -> int:
        print("called")
        return int(context.world_size)

    heard_before: list[str] = []
    with supervised(speak, SpeaksWhenUnpickled(), before_begin=heard_before.extend) as (supervisor, lines, _):
        assert supervisor.wait() is None
        assert value_of(supervisor) == 1
    assert heard_before == ["imported"]
    assert lines == ["imported", "called"]


def test_function_that_cannot_be_unpickled_fails_the_rank() -> None:
    with supervised(lambda context, _: None, CannotBeUnpickled()) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error.startswith("ValueError: invalid literal")


def test_garbage_is_collected_while_the_function_runs() -> None:
    def look(context: Any) -> bool:
        import gc

        return gc.isenabled()

    with supervised(look) as (supervisor, _, _):
        assert supervisor.wait() is None
        assert value_of(supervisor)


def test_function_of_many_chunks_arrives_whole() -> None:
    data = os.urandom((9 << 20) + 3)

    with supervised(lambda context, sent: len(sent), data) as (supervisor, _, _):
        assert supervisor.wait() is None
        assert value_of(supervisor) == len(data)


def test_exception_is_told_with_its_traceback() -> None:
    def fail(context: Any) -> None:
        raise LookupError("in vain")

    with supervised(fail) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "LookupError: in vain"
    assert "in fail" in failure.traceback
    assert isinstance(unpack_error(failure.pickled), LookupError)
    assert not failure.is_consequence


def test_exception_with_a_large_pickle_keeps_its_traceback() -> None:
    def fail(context: Any) -> None:
        error = LookupError("in vain")
        error.data = bytes(70 << 20)
        raise error

    with supervised(fail) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert "in fail" in failure.traceback
    assert len(unpack_error(failure.pickled).data) == 70 << 20


def test_error_raised_from_a_failed_collective_is_a_consequence() -> None:
    def fail(context: Any) -> None:
        try:
            raise RankLostError("rank 1 is gone")
        except RankLostError as error:
            raise ValueError("no gradients") from error

    with supervised(fail) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "ValueError: no gradients"
    assert failure.is_consequence


def test_rank_that_returned_is_not_held_up_by_a_thread_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_supervisor, "EXIT_GRACE_S", 0.5)

    def leave_a_thread(context: Any) -> int:
        threading.Thread(target=threading.Event().wait).start()
        return 7

    with supervised(leave_a_thread) as (supervisor, _, _):
        assert supervisor.wait() is None
        assert value_of(supervisor) == 7


def test_task_that_cannot_take_what_a_rank_says_ends_it() -> None:
    def speak(context: Any) -> None:
        context.report({"number": 1})
        threading.Event().wait(600)

    def refuse(event: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with supervised(speak, on_event=refuse) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert "No space left on device" in failure.error


def test_line_without_an_end_arrives_in_pieces() -> None:
    with supervised(lambda context: print("x" * (9 << 20))) as (supervisor, lines, _):
        assert supervisor.wait() is None
    assert "".join(lines) == "x" * (9 << 20)


def test_value_that_cannot_be_pickled_is_a_failure() -> None:
    with supervised(lambda context: threading.Lock()) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert "cannot pickle" in failure.error


def test_exit_without_a_value_is_a_failure_with_the_last_lines_and_no_loss() -> None:
    def leave(context: Any) -> None:
        print("last words", flush=True)
        os._exit(3)

    with supervised(leave) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert "exited with status 3" in failure.error
    assert failure.traceback == "last words\n"
    assert not failure.is_loss


def test_native_crash_is_a_loss_told_with_its_signal_and_python_stack() -> None:
    with supervised(lambda context: os.kill(os.getpid(), signal.SIGSEGV)) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert "SIGSEGV" in failure.error
    assert "Segmentation fault" in failure.traceback
    assert failure.is_loss


def test_stopped_rank_ends_with_its_children_and_the_reason() -> None:
    def hang(context: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        context.report({"child": child.pid})
        threading.Event().wait(600)

    with supervised(hang) as (supervisor, _, events):
        reported = threading.Event()
        while not events:
            reported.wait(0.02)
        supervisor.stop(StopReason("rank 1 failed"))
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "rank 1 failed"
    assert failure.is_consequence
    assert wait_until_gone([supervisor.pid, events[0]["child"]], 5) == []


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


def test_signs_of_a_rank_tell_that_it_lives_and_since_when_it_told_of_no_progress() -> None:
    def go_on(context: Any) -> None:
        context.report({"here": 1})
        threading.Event().wait(1.0)
        context.progress()
        threading.Event().wait(600)

    with supervised(go_on) as (supervisor, _, events):
        assert eventually(lambda: bool(events), timeout_s=30)
        assert supervisor.signs().idle_s is None
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


def test_guard_ends_the_group_when_its_starter_dies() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    starter = (
        "import os, sys; from sparkdl.launch.process_guard import ProcessGuard;"
        f"guard = ProcessGuard({sleeper.pid}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", starter], check=False, timeout=30)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_released_guard_leaves_the_group_alone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        ProcessGuard(process.pid).release()
        process.communicate(b"\n", timeout=30)
    assert process.returncode == 0
