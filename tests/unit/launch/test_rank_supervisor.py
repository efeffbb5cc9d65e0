from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import RankLostError
from sparkdl.launch.task import supervisor as rank_supervisor
from sparkdl.launch.wire.messages import unpack_error
from sparkdl.launch.wire.outcome import StopReason
from tests.processes import wait_until_gone
from tests.unit.launch.supervised_rank import supervised, value_of


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


def test_rank_that_was_stopped_before_it_began_runs_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with supervised(lambda context: ran.touch(), stop_before_begin=StopReason("enough")) as (
        supervisor,
        _,
        _,
    ):
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "enough"
    assert not ran.exists()


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


def test_death_is_told_with_the_place_that_was_noted_last() -> None:
    def crash(context: Any) -> None:
        context.note_place("epoch 12, step 345")
        context.note_place("epoch 2, step 5")
        os.kill(os.getpid(), signal.SIGSEGV)

    with supervised(crash) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "its process was ended by SIGSEGV in epoch 2, step 5"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, r"^SystemExit: 0\. The function.* ended with sys\.exit\(\) and did not return: return from it"),
        (3, r"^SystemExit: 3\. The function.* ended with sys\.exit\(\) and did not return$"),
    ],
)
def test_exit_by_an_exception_is_told_as_such(code: int, said: str) -> None:
    with supervised(lambda context: sys.exit(code)) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert re.search(said, failure.error)


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
