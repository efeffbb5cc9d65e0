from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from sparkdl.collective import Deadline
from sparkdl.errors import RankLostError
from sparkdl.launch.forkserver import forked_rank
from sparkdl.launch.task import supervisor as rank_supervisor
from sparkdl.launch.task.supervisor import OutputRelay
from sparkdl.launch.wire.messages import unpack_error
from sparkdl.launch.wire.outcome import RankHealth, StopReason
from tests.collective.eventually import eventually
from tests.processes import wait_until_gone
from tests.unit.launch.supervised_rank import failure_of, returned_by, supervised, value_of


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_supervisor, "ABORT_GRACE_S", 0.2)


def test_rank_has_no_credentials_of_the_process_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
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

    assert returned_by(look) == ([], False)


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


def test_function_is_unpickled_before_the_assignment_and_called_after_it() -> None:
    def speak(context: Any, _: Any) -> int:
        print("called")
        return int(context.world_size)

    heard_before: list[str] = []
    with supervised(speak, SpeaksWhenUnpickled(), before_begin=heard_before.extend) as (supervisor, lines, _):
        assert supervisor.wait() is None
        assert value_of(supervisor) == 1
    assert heard_before == ["imported"]
    assert lines == ["imported", "called"]


def test_rank_that_was_stopped_before_its_assignment_runs_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    failure = failure_of(lambda context: ran.touch(), stop_before_begin=StopReason("enough"))
    assert failure.error == "enough"
    assert not ran.exists()


def test_function_that_cannot_be_unpickled_fails_the_rank() -> None:
    failure = failure_of(lambda context, _: None, CannotBeUnpickled())
    assert failure.error.startswith("ValueError: invalid literal")


def test_garbage_is_collected_while_the_function_runs() -> None:
    def look(context: Any) -> bool:
        import gc

        return gc.isenabled()

    assert returned_by(look)


def test_function_of_many_chunks_arrives_whole() -> None:
    data = os.urandom((9 << 20) + 3)

    assert returned_by(lambda context, sent: len(sent), data) == len(data)


@pytest.mark.parametrize("num_bytes", [0, 70 << 20])
def test_exception_of_any_size_is_reported_with_its_traceback(num_bytes: int) -> None:
    def fail(context: Any) -> None:
        error = LookupError("in vain")
        error.data = bytes(num_bytes)
        raise error

    failure = failure_of(fail)
    assert failure.error == "LookupError: in vain"
    assert "in fail" in failure.traceback
    assert not failure.is_consequence
    error = unpack_error(failure.pickled)
    assert isinstance(error, LookupError)
    assert len(error.data) == num_bytes


def test_error_raised_from_a_failed_collective_is_a_consequence() -> None:
    def fail(context: Any) -> None:
        try:
            raise RankLostError("rank 1 is gone")
        except RankLostError as error:
            raise ValueError("no gradients") from error

    failure = failure_of(fail)
    assert failure.error == "ValueError: no gradients"
    assert failure.is_consequence


def test_thread_that_never_ends_does_not_block_a_rank_that_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_supervisor, "EXIT_GRACE_S", 0.5)

    def leave_a_thread(context: Any) -> int:
        threading.Thread(target=threading.Event().wait).start()
        return 7

    assert returned_by(leave_a_thread) == 7


def test_task_that_cannot_process_the_output_of_a_rank_ends_it() -> None:
    def speak(context: Any) -> None:
        context.report({"number": 1})
        threading.Event().wait(600)

    def refuse(event: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    failure = failure_of(speak, on_event=refuse)
    assert "No space left on device" in failure.error


def test_value_that_cannot_be_written_names_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_supervisor, "RESULT_BYTES", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    failure = failure_of(lambda context: b"1" * 2000)
    assert f"the value that its function returned cannot be written to '{tmp_path}/gone'" in failure.error
    assert "Free space there, or set TMPDIR" in failure.error


def test_line_without_an_end_arrives_in_parts() -> None:
    with supervised(lambda context: print("x" * (9 << 20))) as (supervisor, lines, _):
        assert supervisor.wait() is None
    assert "".join(lines) == "x" * (9 << 20)


def test_value_that_cannot_be_pickled_is_a_failure() -> None:
    failure = failure_of(lambda context: threading.Lock())
    assert "The value that the function returned cannot be pickled: TypeError: cannot pickle" in failure.error


def test_exit_without_a_value_is_a_failure_with_the_last_lines_and_no_loss() -> None:
    def leave(context: Any) -> None:
        print("last words", flush=True)
        os._exit(3)

    failure = failure_of(leave)
    assert "exited with status 3" in failure.error
    assert failure.traceback == "last words\n"
    assert not failure.is_loss


def test_native_crash_is_a_loss_with_its_signal_last_position_and_python_stack() -> None:
    def crash(context: Any) -> None:
        context.note_position("epoch 12, step 345")
        context.note_position("epoch 2, step 5")
        os.kill(os.getpid(), signal.SIGSEGV)

    failure = failure_of(crash)
    assert failure.error == "its process was ended by SIGSEGV in epoch 2, step 5"
    assert "Segmentation fault" in failure.traceback
    assert failure.is_loss


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            0,
            r"^SystemExit: 0\. The function.* ended with sys\.exit\(\) and did not return: use return instead",
        ),
        (3, r"^SystemExit: 3\. The function.* ended with sys\.exit\(\) and did not return$"),
    ],
)
def test_sys_exit_is_reported_as_system_exit(code: int, said: str) -> None:
    failure = failure_of(lambda context: sys.exit(code))
    assert re.search(said, failure.error)


def test_stopped_rank_ends_with_its_children_and_the_reason() -> None:
    def hang(context: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        context.report({"child": child.pid})
        threading.Event().wait(600)

    with supervised(hang) as (supervisor, _, events):
        assert eventually(lambda: bool(events), timeout_s=30)
        supervisor.stop(StopReason("rank 1 failed"))
        failure = supervisor.wait()
    assert failure.error == "rank 1 failed"
    assert failure.is_consequence
    assert wait_until_gone([supervisor.pid, events[0]["child"]]) == []


def test_rank_that_does_not_end_after_a_failure_is_reported_with_its_stack() -> None:
    def wait_long(context: Any) -> None:
        context.report({"number": 1})
        threading.Event().wait(600)

    with supervised(wait_long) as (supervisor, _, events):
        assert eventually(lambda: bool(events) and supervisor.health().silent_s < 60, timeout_s=30)
        supervisor.stop(StopReason("rank 1 failed"))
        failure = supervisor.wait()
    assert "in wait_long" in failure.stack
    assert not failure.is_hang


def test_rank_that_cannot_be_reaped_in_time_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_rank, "KILL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(rank_supervisor, "LAST_LINES_TIMEOUT_S", 0.2)

    def stop_the_forkserver(context: Any) -> None:
        os.kill(os.getppid(), signal.SIGSTOP)  # the parent then cannot report the end of the rank
        context.report({"parent": os.getppid()})
        threading.Event().wait(600)

    with supervised(stop_the_forkserver) as (supervisor, lines, events):
        assert eventually(lambda: bool(events), timeout_s=30)
        parent = events[0]["parent"]
        try:
            supervisor.stop(StopReason("rank 1 failed"))
            failure = supervisor.wait()
        finally:
            os.kill(parent, signal.SIGCONT)
    assert failure.error == "rank 1 failed"
    assert "could not be ended" in lines[-1]
    assert wait_until_gone([parent]) == []


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
    threading.Event().wait(600)  # like a rank that continues while one of its threads writes the stacks


@pytest.mark.parametrize("function", [sleep_in_python, spin, sleep_with_pythons_lock, be_stopped])
def test_rank_that_hangs_anywhere_is_ended_with_its_python_stack(function: Any) -> None:
    with supervised(function) as (supervisor, _, events):
        assert eventually(lambda: bool(events), timeout_s=30)
        if function in (sleep_with_pythons_lock, be_stopped):
            assert eventually(lambda: supervisor.health().silent_s > 1.2, timeout_s=30)
        if function is be_stopped:
            assert eventually(lambda: supervisor.health().state == "is stopped, as by SIGSTOP", timeout_s=30)
        supervisor.stop(StopReason("rank 0 hangs", is_hang=True))
        failure = supervisor.wait()
    assert failure.is_hang
    assert failure.is_consequence
    head, frame = failure.stack.splitlines()[:2]
    assert head == "Thread MainThread (most recent call first):"
    assert f"in {function.__name__}" in failure.stack, frame
    assert wait_until_gone([supervisor.pid]) == []


def test_rank_is_idle_between_its_first_progress_and_the_end_of_its_steps(tmp_path: Path) -> None:
    def train_and_write(context: Any) -> None:
        context.report({"here": 1})
        while not (tmp_path / "seen").exists():
            threading.Event().wait(0.02)
        context.progress()
        while not (tmp_path / "trained").exists():
            threading.Event().wait(0.02)
        context.progress(done=True)
        threading.Event().wait(600)

    with supervised(train_and_write) as (supervisor, _, events):
        assert eventually(lambda: bool(events), timeout_s=30)
        assert supervisor.health().idle_s is None
        (tmp_path / "seen").touch()
        assert eventually(lambda: (supervisor.health().idle_s or 0.0) > 0.6, timeout_s=30)
        assert supervisor.health().state == ""
        assert supervisor.health().waits == ()
        (tmp_path / "trained").touch()
        assert eventually(lambda: supervisor.health().idle_s is None, timeout_s=30)
        assert not supervisor.health().state, "it lives"


def test_rank_that_has_returned_needs_no_heartbeat() -> None:
    with supervised(lambda context: 1) as (supervisor, _, _):
        assert supervisor.wait() is None
        assert not threading.Event().wait(0.3)
        assert supervisor.health() == RankHealth(), "its task may wait for the others for hours"


def test_rank_whose_task_is_slow_to_receive_is_not_silent() -> None:
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
        assert supervisor.health().silent_s == 0.0
        goes_on.set()
        assert supervisor.wait() is None


@pytest.fixture
def pipe() -> tuple[BinaryIO, int]:
    read_fd, write_fd = os.pipe()
    return os.fdopen(read_fd, "rb"), write_fd


def test_paused_reader_gets_its_line_and_an_open_stream_is_reported(pipe: tuple[BinaryIO, int]) -> None:
    output, write_fd = pipe
    lines: list[bytes] = []
    taken, gate = threading.Event(), threading.Event()

    def take(line: bytes) -> None:
        taken.set()
        gate.wait(10.0)
        lines.append(line)

    relay = OutputRelay(output, on_line=take, on_error=_raise, name="relay")
    os.write(write_fd, b"first\n")
    assert taken.wait(10.0)
    threading.Timer(0.2, gate.set).start()
    assert not relay.finish(Deadline(0.0), is_patient=True), "the stream is still open"
    assert lines == [b"first\n"]
    os.close(write_fd)


def test_impatient_finish_does_not_wait_for_a_stopped_reader(pipe: tuple[BinaryIO, int]) -> None:
    output, write_fd = pipe
    taken, gate = threading.Event(), threading.Event()

    def take(line: bytes) -> None:
        taken.set()
        gate.wait(10.0)

    relay = OutputRelay(output, on_line=take, on_error=_raise, name="relay")
    os.write(write_fd, b"first\n")
    os.close(write_fd)
    assert taken.wait(10.0)
    assert relay.finish(Deadline(0.0), is_patient=False)
    assert not gate.is_set()
    gate.set()


def test_stream_that_ends_is_finished(pipe: tuple[BinaryIO, int]) -> None:
    output, write_fd = pipe
    lines: list[bytes] = []
    relay = OutputRelay(output, on_line=lines.append, on_error=_raise, name="relay")
    os.write(write_fd, b"only\nno end")
    os.close(write_fd)
    assert relay.finish(Deadline(5.0), is_patient=True)
    assert lines == [b"only\n", b"no end"]


def _raise(error: OSError) -> None:
    raise error
