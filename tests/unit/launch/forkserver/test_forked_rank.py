"""Ranks forked from a forkserver that is kept for the next rank."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sparkdl.launch.forkserver import client, reuse
from sparkdl.launch.forkserver.reuse import prepare_in_task
from sparkdl.launch.forkserver.start import connect_or_start
from sparkdl.launch.task import supervisor as rank_supervisor
from sparkdl.launch.wire.outcome import Failure, StopReason
from tests.collective.eventually import eventually
from tests.processes import wait_until_gone
from tests.unit.launch.supervised_rank import returned_by, supervised, value_of
from tests.unkillable import unseen_end


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_supervisor, "ABORT_GRACE_S", 0.2)


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
    assert wait_until_gone([first["parent"]], 10) == []


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
    assert wait_until_gone([first["parent"]], 10) == []
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
    assert wait_until_gone([pid], 10) == []


def test_rank_that_is_ended_during_imports_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    with supervised(
        look_around, modules=("slow_library",), environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    ) as (supervisor, _, _):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            threading.Event().wait(0.02)
        supervisor.stop(StopReason("another rank failed"))
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "another rank failed"
    assert wait_until_gone([int((tmp_path / "pid").read_text())], 10) == []


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
    assert "still holds its output open" in lines[-1]


def test_large_function_and_stopping_do_not_wait_for_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(600)\n")
    ballast = os.urandom(16 << 20)
    with supervised(
        lambda context: len(ballast),
        modules=("slow_library",),
        environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
    ) as (supervisor, _, _):  # the rank would never call it
        supervisor.stop(StopReason("another rank failed"))
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "another rank failed"


def test_forkserver_that_dies_during_imports_is_a_failure_with_its_output_and_no_loss(tmp_path: Path) -> None:
    (tmp_path / "bad_library.py").write_text(
        "import os\nprint('no such processor', flush=True)\nos.abort()\n"
    )
    with supervised(
        look_around, modules=("bad_library",), environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    ) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    assert "could not be started: the forkserver was ended by SIGABRT" in failure.error
    assert "no such processor" in failure.traceback
    assert "bad_library" in failure.traceback, "where it was"
    assert not failure.is_loss


def test_endless_import_is_a_failure_with_the_stack_of_the_forkserver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_supervisor, "START_TIMEOUT_S", 0.2)
    began = tmp_path / "began"
    (tmp_path / "endless_library.py").write_text(
        f"import threading\nopen({str(began)!r}, 'w').close()\nthreading.Event().wait()\n"
    )
    with supervised(
        look_around, modules=("endless_library",), environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    ) as (supervisor, _, _):
        assert eventually(began.exists, timeout_s=60)
        failure = supervisor.wait()
    assert failure is not None
    assert "had not started after 0.2 s, as its forkserver still imports" in failure.error
    assert "endless_library" in failure.traceback


def test_stopped_forkserver_is_a_failure_and_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_supervisor, "START_TIMEOUT_S", 0.5)
    with supervised(look_around, modules=("wave",), environment={"OF_ALL": "stopped"}) as (supervisor, _, _):
        forkserver = supervisor._process._forkserver.pid
        os.kill(forkserver, signal.SIGSTOP)
        failure = supervisor.wait()
    assert failure is not None
    assert "as its forkserver is stopped, as by SIGSTOP" in failure.error
    assert wait_until_gone([forkserver], 10) == []


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
    first = returned_by(look_around)
    child = os.fork()
    if child == 0:
        reuse._disconnect_idle()
        os._exit(len(reuse._idle))
    assert os.waitpid(child, 0)[1] == 0
    assert returned_by(look_around)["parent"] == first["parent"]


def test_forkserver_that_a_task_prepares_is_used_and_later_partitions_prepare_none() -> None:
    reuse._disconnect_idle()
    prepare_in_task(2, num_ranks=2, modules=("wave",))
    assert reuse._idle == []
    prepare_in_task(1, num_ranks=2, modules=("wave",))
    (prepared,) = reuse._idle
    prepare_in_task(0, num_ranks=2, modules=("wave",))
    assert reuse._idle == [prepared]
    assert returned_by(look_around, modules=("wave",))["parent"] == prepared.forkserver.pid


def test_idle_forkserver_is_ended_unless_it_was_used_meanwhile() -> None:
    returned_by(look_around)
    (idle,) = reuse._idle
    reuse.end_idle_forkservers(3600.0)
    waiting = reuse._num_requests[0]
    returned_by(look_around)
    assert (reuse._idle, reuse._num_requests[0]) == ([idle], waiting + 1)
    reuse.end_idle_forkservers(0.0)
    assert wait_until_gone([idle.forkserver.pid], 10) == []
    assert returned_by(look_around)["parent"] != idle.forkserver.pid


def test_rank_and_forkserver_end_when_the_worker_is_killed(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys, time\n"
        "from sparkdl.launch.rank.environment import rank_environment\n"
        "from sparkdl.launch.forkserver.forked_rank import ForkedRank\n"
        "from sparkdl.launch.rank.stacks import StackFile\n"
        "import socket\n"
        "ours, theirs = socket.socketpair()\n"
        "rank = ForkedRank(environment=rank_environment({}, gpus=None), more_variables={}, modules=(),\n"
        "    name='rank', task=theirs.fileno(), stacks=StackFile().fd, inherited={},\n"
        "    on_start=lambda: None, on_exit=lambda: None)\n"
        "print(rank.pid, rank._forkserver.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(
        [sys.executable, str(worker)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    assert wait_until_gone(pids, 10) == []


def test_forkserver_that_imports_ends_when_the_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    worker = (
        "import os, time; from sparkdl.launch.forkserver.start import connect_or_start\n"
        "forkserver = connect_or_start(dict(os.environ), ['slow_library'])\n"
        f"while not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    assert (
        subprocess.run([sys.executable, "-c", worker], env=environment, timeout=500, check=False).returncode
        == -9
    )
    while not (tmp_path / "pid").read_text():
        threading.Event().wait(0.02)
    assert wait_until_gone([int((tmp_path / "pid").read_text())], 10) == []


def test_disconnecting_does_not_wait_for_a_forkserver_that_cannot_be_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_END_TIMEOUT_S", 0.2)
    forkserver = connect_or_start(dict(os.environ), ())
    os.kill(forkserver.pid, signal.SIGSTOP)
    with unseen_end(forkserver.pid):
        forkserver.disconnect()
        assert forkserver.describe_exit() == "ended"
    assert wait_until_gone([forkserver.pid], 10) == []
