"""Ranks forked from a forkserver that is kept for the next rank."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkdl.launch.forkserver import client
from sparkdl.launch.forkserver.reuse import end_idle_forkservers, prepare_in_task
from sparkdl.launch.forkserver.start import connect_or_start
from sparkdl.launch.task import supervisor as rank_supervisor
from sparkdl.launch.wire.outcome import Failure, StopReason
from tests.collective.eventually import eventually
from tests.processes import wait_until_gone
from tests.unit.launch.forkserver.test_guard import children
from tests.unit.launch.supervised_rank import failure_of, returned_by, supervised, value_of
from tests.unkillable import unseen_end


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_supervisor, "ABORT_GRACE_S", 0.2)


def importing(folder: Path, source: str) -> dict[str, Any]:
    """Write a library; return the options of a rank whose forkserver imports it."""
    (folder / "own_library.py").write_text(source)
    return {"modules": ("own_library",), "environment": {"PYTHONPATH": f"{folder}:{Path.cwd()}"}}


def imported_forever(folder: Path) -> str:
    """The source of a library whose import does not end, and which writes the process id of its importer."""
    return f"import os, time\nopen({str(folder / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"


def pid_of_importer(folder: Path) -> int:
    assert eventually(lambda: (folder / "pid").exists() and (folder / "pid").read_text(), timeout_s=60)
    return int((folder / "pid").read_text())


def look_around(context: Any) -> dict[str, Any]:
    import numpy as np

    del context
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "imported": "wave" in sys.modules,
        "drawn": np.random.random(),
        "folder": os.getcwd(),
        "variables": {name: os.environ.get(name) for name in ("OF_ALL", "OF_LAUNCH", "NUMBER")},
        "name": Path("/proc/self/comm").read_text().strip(),
        "group": os.getpgid(0),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "handler": signal.getsignal(signal.SIGCHLD),
    }


def test_next_rank_is_forked_from_the_same_forkserver_and_looks_like_a_new_process(tmp_path: Path) -> None:
    before = Path.cwd()
    first = returned_by(look_around, modules=("wave",), environment={"OF_ALL": "1"})
    os.chdir(tmp_path)
    try:
        second = returned_by(
            look_around, modules=("wave",), environment={"OF_ALL": "1"}, more_variables={"OF_LAUNCH": "2"}
        )
    finally:
        os.chdir(before)
    assert second["parent"] == first["parent"] != os.getpid()
    assert first["imported"]
    assert first["drawn"] != second["drawn"]
    assert second["folder"] == str(tmp_path)
    assert first["variables"] == {"OF_ALL": "1", "OF_LAUNCH": None, "NUMBER": None}
    assert second["variables"] == {"OF_ALL": "1", "OF_LAUNCH": "2", "NUMBER": None}
    assert first["name"] == "sparkdl-rank-0"
    assert first["group"] == first["pid"] != second["pid"]
    assert first["descriptors"] == second["descriptors"]
    assert first["handler"] == signal.SIG_DFL


@pytest.mark.parametrize("other", [{"environment": {"OF_ALL": "2"}}, {"modules": ("wave", "colorsys")}])
def test_other_environment_or_modules_start_another_forkserver_and_the_first_one_ends(
    other: dict[str, Any],
) -> None:
    usual: dict[str, Any] = {"modules": ("wave",), "environment": {"OF_ALL": "1"}}
    first = returned_by(look_around, **usual)
    second = returned_by(look_around, **{**usual, **other})
    assert second["parent"] != first["parent"]
    assert wait_until_gone([first["parent"]]) == []


def test_rank_inherits_descriptors_and_gets_their_numbers() -> None:
    reading, writing = os.pipe()

    def write(context: Any) -> None:
        os.write(int(os.environ["NUMBER"]), b"heard")

    returned_by(write, inherited={"NUMBER": writing})
    os.close(writing)
    assert os.read(reading, 10) == b"heard"
    assert os.read(reading, 10) == b""  # the other end is closed everywhere
    os.close(reading)


def test_module_that_cannot_be_imported_does_not_end_the_forkserver() -> None:
    assert returned_by(look_around, modules=("no.such.module", "wave"))["imported"]


def test_forkserver_that_was_killed_while_idle_is_replaced() -> None:
    first = returned_by(look_around)
    os.kill(first["parent"], signal.SIGKILL)
    assert wait_until_gone([first["parent"]]) == []
    assert returned_by(look_around)["parent"] != first["parent"]


def test_rank_ends_with_its_forkserver_and_counts_as_lost() -> None:
    def kill_parent(context: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait(600)

    with supervised(kill_parent) as (supervisor, _, _):
        pid = supervisor.pid
        failure = supervisor.wait()
    assert isinstance(failure, Failure)
    assert "SIGKILL" in failure.error
    assert failure.is_loss
    assert wait_until_gone([pid]) == []


def test_rank_with_a_large_function_that_is_ended_during_imports_leaves_no_process(tmp_path: Path) -> None:
    ballast = os.urandom(16 << 20)  # nothing receives it before the imports end
    with supervised(lambda context: len(ballast), **importing(tmp_path, imported_forever(tmp_path))) as (
        supervisor,
        *_,
    ):
        importer = pid_of_importer(tmp_path)
        supervisor.stop(StopReason("another rank failed"))
        failure = supervisor.wait()
    assert failure.error == "another rank failed"
    assert wait_until_gone([importer]) == []


def test_process_that_holds_the_output_of_an_ended_rank_does_not_block_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_supervisor, "LAST_LINES_TIMEOUT_S", 0.2)

    def start_daemon(context: Any) -> int:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        return child.pid

    with supervised(start_daemon) as (supervisor, lines, _):
        assert supervisor.wait() is None
        os.kill(value_of(supervisor), signal.SIGKILL)
    assert "still holds the output of the rank open" in lines[-1]


def test_forkserver_that_dies_during_imports_is_a_failure_with_its_output_and_no_loss(tmp_path: Path) -> None:
    source = "import os\nprint('no such processor', flush=True)\nos.abort()\n"
    failure = failure_of(look_around, **importing(tmp_path, source))
    assert "could not be started: the forkserver was ended by SIGABRT" in failure.error
    assert "no such processor" in failure.traceback
    assert "own_library" in failure.traceback, "where it was"
    assert not failure.is_loss


def test_endless_import_is_a_failure_with_the_stack_of_the_forkserver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_supervisor, "START_TIMEOUT_S", 0.2)
    with supervised(look_around, **importing(tmp_path, imported_forever(tmp_path))) as (supervisor, *_):
        pid_of_importer(tmp_path)
        failure = supervisor.wait()
    assert "had not started after 0.2 s" in failure.error
    assert "forkserver is still importing" in failure.error
    assert "own_library" in failure.traceback


def test_stopped_forkserver_is_a_failure_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    forkserver = returned_by(look_around)["parent"]
    os.kill(forkserver, signal.SIGSTOP)
    monkeypatch.setattr(rank_supervisor, "START_TIMEOUT_S", 0.5)
    failure = failure_of(look_around)
    assert "as its forkserver is stopped, as by SIGSTOP" in failure.error
    assert wait_until_gone([forkserver]) == []


def test_worker_with_many_descriptors_starts_ranks() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert returned_by(look_around, environment={"OF_ALL": "many"})["pid"]
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_fork_of_the_worker_neither_ends_nor_keeps_the_forkserver() -> None:
    forkserver = returned_by(look_around)["parent"]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            end_idle_forkservers(0.0)
            for thread in set(threading.enumerate()) - {threading.current_thread()}:
                thread.join()
            os.write(writing, b"done")
            signal.pause()
        finally:
            os._exit(1)  # the fork must not return into the tests
    assert os.read(reading, 4) == b"done"
    assert returned_by(look_around)["parent"] == forkserver
    end_idle_forkservers(0.0)
    assert wait_until_gone([forkserver]) == []
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


def test_forkserver_that_a_task_prepares_is_used_and_later_partitions_prepare_none() -> None:
    before = children()
    prepare_in_task(2, num_ranks=2, num_threads=1, modules=("wave",))
    assert children() <= before
    prepare_in_task(1, num_ranks=2, num_threads=1, modules=("wave",))
    prepare_in_task(0, num_ranks=2, num_threads=1, modules=("wave",))
    (prepared,) = children() - before
    assert returned_by(look_around, modules=("wave",))["parent"] == prepared


def test_idle_forkserver_is_ended_unless_it_was_used_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], None]] = []

    def timer(_: float, call: Callable[[], None]) -> threading.Thread:
        calls.append(call)
        return threading.Thread()

    monkeypatch.setattr(threading, "Timer", timer)
    idle = returned_by(look_around)["parent"]
    end_idle_forkservers(3600.0)
    assert returned_by(look_around)["parent"] == idle
    calls.pop()()
    assert returned_by(look_around)["parent"] == idle
    end_idle_forkservers(3600.0)
    calls.pop()()
    assert wait_until_gone([idle]) == []
    assert returned_by(look_around)["parent"] != idle


def test_forkserver_that_imports_ends_when_the_worker_is_killed(tmp_path: Path) -> None:
    worker = (
        "import os, time; from sparkdl.launch.forkserver.start import connect_or_start\n"
        "forkserver = connect_or_start(dict(os.environ), ['own_library'])\n"
        "time.sleep(600)"
    )
    variables = {**os.environ, **importing(tmp_path, imported_forever(tmp_path))["environment"]}
    with subprocess.Popen([sys.executable, "-c", worker], env=variables) as process:
        importer = pid_of_importer(tmp_path)
        process.kill()
    assert wait_until_gone([importer]) == []


def test_disconnecting_does_not_wait_for_a_forkserver_that_cannot_be_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "END_TIMEOUT_S", 0.2)
    forkserver = connect_or_start(dict(os.environ), ())
    os.kill(forkserver.pid, signal.SIGSTOP)
    with unseen_end(forkserver.pid):
        forkserver.disconnect()
        assert forkserver.describe_exit() == "ended"
    assert wait_until_gone([forkserver.pid]) == []
