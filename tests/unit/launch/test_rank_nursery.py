"""Ranks that are forked from a process which has imported what they need, and which serves the next one, too."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from sparkdl.collective import Coordinator
from sparkdl.launch.forkserver import client
from sparkdl.launch.forkserver import kept as kept_nurseries
from sparkdl.launch.forkserver.kept import prepare_in_task
from sparkdl.launch.forkserver.start import reach_nursery
from sparkdl.launch.rank.environment import rank_environment
from sparkdl.launch.task import supervisor as rank_supervisor
from sparkdl.launch.task.supervisor import RankSupervisor
from sparkdl.launch.wire.outcome import Failure, StopReason
from sparkdl.rendezvous.channel import new_secret
from tests.processes import wait_until_gone
from tests.unit.launch.orders import order_of_one
from tests.unkillable import unseen_end


@contextmanager
def supervised(function: Callable[[Any], Any], **options: Any) -> Iterator[RankSupervisor]:
    secret = new_secret()
    with (
        Coordinator(secret=secret, world_size=1, host="127.0.0.1") as coordinator,
        RankSupervisor(
            rank=0,
            payload=cloudpickle.dumps((function, (), {})),
            environment=rank_environment(options.pop("environment", {}), gpus=None),
            on_line=options.pop("on_line", lambda line: None),
            on_event=lambda event: None,
            **options,
        ) as supervisor,
    ):
        supervisor.begin(order_of_one(coordinator, secret))
        yield supervisor


def value_of(function: Callable[[Any], Any], **options: Any) -> Any:
    with supervised(function, **options) as supervisor:
        failure = supervisor.wait()
        assert failure is None, failure
        supervisor.result.seek(0)
        return cloudpickle.load(supervisor.result)


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


def test_the_next_rank_comes_from_the_same_process_and_finds_what_a_new_one_would(tmp_path: Path) -> None:
    before = Path.cwd()
    first = value_of(look_around, modules=("wave",), environment={"OF_ALL": "1"})
    os.chdir(tmp_path)
    try:
        second = value_of(
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
def test_another_environment_or_other_modules_need_another_process_and_the_first_one_ends(
    other: dict[str, Any],
) -> None:
    usual: dict[str, Any] = {"modules": ("wave",), "environment": {"OF_ALL": "1"}}
    first = value_of(look_around, **usual)
    second = value_of(look_around, **{**usual, **other})
    assert second["parent"] != first["parent"]
    assert wait_until_gone([first["parent"]], 10) == []


def test_a_rank_inherits_descriptors_and_learns_their_numbers() -> None:
    reading, writing = os.pipe()

    def write(context: Any) -> None:
        os.write(int(os.environ["NUMBER"]), b"heard")

    value_of(write, inherited={"NUMBER": writing})
    os.close(writing)
    assert os.read(reading, 10) == b"heard"
    assert os.read(reading, 10) == b""  # nobody holds the other end any more
    os.close(reading)


def test_a_module_that_cannot_be_imported_is_the_ranks_to_miss() -> None:
    assert value_of(look_around, modules=("no.such.module", "wave"))["imported"]


def test_a_process_that_was_ended_while_idle_is_replaced() -> None:
    first = value_of(look_around)
    os.kill(first["parent"], signal.SIGKILL)
    assert wait_until_gone([first["parent"]], 10) == []
    assert value_of(look_around)["parent"] != first["parent"]


def test_a_rank_ends_with_the_process_that_it_was_forked_from_and_counts_as_lost() -> None:
    def kill_parent(context: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait(600)

    with supervised(kill_parent) as supervisor:
        pid = supervisor.pid
        failure = supervisor.wait()
    assert isinstance(failure, Failure)
    assert "SIGKILL" in failure.error
    assert failure.is_loss
    assert wait_until_gone([pid], 10) == []


def test_a_rank_that_is_ended_while_its_libraries_are_imported_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    with supervised(
        look_around, modules=("slow_library",), environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    ) as supervisor:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            threading.Event().wait(0.02)
        supervisor.stop(StopReason("another rank failed"))
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "another rank failed"
    assert wait_until_gone([int((tmp_path / "pid").read_text())], 10) == []


def test_a_rank_that_leaves_a_process_with_its_output_does_not_hold_up_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_supervisor, "LAST_LINES_TIMEOUT_S", 0.2)

    def leave_behind(context: Any) -> int:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        return child.pid

    lines: list[str] = []
    left = value_of(leave_behind, on_line=lines.append)
    os.kill(left, signal.SIGKILL)
    assert "still holds its output open" in lines[-1]


def test_a_large_function_does_not_wait_for_imports_and_stopping_does_not_either(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(600)\n")
    ballast = os.urandom(16 << 20)
    with supervised(
        lambda context: len(ballast),
        modules=("slow_library",),
        environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
    ) as supervisor:  # which it would not reach
        supervisor.stop(StopReason("another rank failed"))
        failure = supervisor.wait()
    assert failure is not None
    assert failure.error == "another rank failed"


def test_what_dies_while_it_imports_is_told_with_its_last_words_and_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "bad_library.py").write_text(
        "import os\nprint('no such processor', flush=True)\nos.abort()\n"
    )
    with supervised(
        look_around, modules=("bad_library",), environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    ) as supervisor:
        failure = supervisor.wait()
    assert failure is not None
    assert "could not be started: the process that imports for it was ended by SIGABRT" in failure.error
    assert "no such processor" in failure.traceback
    assert "bad_library" in failure.traceback, "where it was"
    assert not failure.is_loss


def test_what_never_ends_to_import_is_given_up_and_says_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_supervisor, "START_TIMEOUT_S", 8.0)  # for Python and sparkdl, which come before
    (tmp_path / "endless_library.py").write_text("import threading\nthreading.Event().wait()\n")
    with supervised(
        look_around, modules=("endless_library",), environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    ) as supervisor:
        failure = supervisor.wait()
    assert failure is not None
    assert "was not there after 8 s, as what it is forked from still imports" in failure.error
    assert "endless_library" in failure.traceback


def test_what_is_stopped_before_it_forks_the_rank_is_given_up_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_supervisor, "START_TIMEOUT_S", 0.5)
    with supervised(look_around, modules=("wave",), environment={"OF_ALL": "stopped"}) as supervisor:
        nursery = supervisor._process._nursery.pid
        os.kill(nursery, signal.SIGSTOP)
        failure = supervisor.wait()
    assert failure is not None
    assert "as what it is forked from is stopped, as by SIGSTOP" in failure.error
    assert wait_until_gone([nursery], 10) == []


def test_a_worker_with_many_descriptors_starts_ranks_too() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert value_of(look_around, environment={"OF_ALL": "many"})["pid"]
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_fork_of_the_worker_neither_ends_nor_keeps_what_ranks_are_forked_from() -> None:
    first = value_of(look_around)
    child = os.fork()
    if child == 0:
        kept_nurseries._leave_idle()
        os._exit(len(kept_nurseries._idle))
    assert os.waitpid(child, 0)[1] == 0
    assert value_of(look_around)["parent"] == first["parent"]


def test_what_a_task_prepares_serves_the_next_rank_and_later_partitions_prepare_nothing() -> None:
    kept_nurseries._leave_idle()
    prepare_in_task(2, num_ranks=2, modules=("wave",))
    assert kept_nurseries._idle == []
    prepare_in_task(1, num_ranks=2, modules=("wave",))
    (prepared,) = kept_nurseries._idle
    prepare_in_task(0, num_ranks=2, modules=("wave",))
    assert kept_nurseries._idle == [prepared]
    assert value_of(look_around, modules=("wave",))["parent"] == prepared.nursery.pid


def test_what_nobody_has_wanted_for_a_while_is_ended_and_what_was_wanted_since_stays() -> None:
    value_of(look_around)
    (kept,) = kept_nurseries._idle
    kept_nurseries.end_idle_processes(3600.0)
    waiting = kept_nurseries._num_requests[0]
    value_of(look_around)
    assert (kept_nurseries._idle, kept_nurseries._num_requests[0]) == ([kept], waiting + 1)
    kept_nurseries.end_idle_processes(0.0)
    assert wait_until_gone([kept.nursery.pid], 10) == []
    assert value_of(look_around)["parent"] != kept.nursery.pid


def test_ranks_and_what_they_are_forked_from_end_when_the_worker_is_killed(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys, time\n"
        "from sparkdl.launch.rank.environment import rank_environment\n"
        "from sparkdl.launch.forkserver.forked_rank import ForkedRank\n"
        "from sparkdl.launch.rank.pulse import StackFile\n"
        "import socket\n"
        "ours, theirs = socket.socketpair()\n"
        "rank = ForkedRank(environment=rank_environment({}, gpus=None), more_variables={}, modules=(),\n"
        "    name='rank', task=theirs.fileno(), stacks=StackFile().fd, inherited={},\n"
        "    on_start=lambda: None, on_exit=lambda: None)\n"
        "print(rank.pid, rank._nursery.pid, flush=True)\n"
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


def test_a_process_that_imports_yet_ends_with_the_worker(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    worker = (
        "import os, time; from sparkdl.launch.forkserver.start import reach_nursery\n"
        "nursery = reach_nursery(dict(os.environ), ['slow_library'])\n"
        f"while not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    assert (
        subprocess.run([sys.executable, "-c", worker], env=environment, timeout=60, check=False).returncode
        == -9
    )
    while not (tmp_path / "pid").read_text():
        threading.Event().wait(0.02)
    assert wait_until_gone([int((tmp_path / "pid").read_text())], 10) == []


def test_process_that_ranks_are_forked_from_is_left_when_nobody_sees_it_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_END_TIMEOUT_S", 0.2)
    nursery = reach_nursery(dict(os.environ), ())
    os.kill(nursery.pid, signal.SIGSTOP)
    with unseen_end(nursery.pid):
        begin = time.monotonic()
        nursery.leave()
        assert nursery.how_it_ended() == "ended"
        assert time.monotonic() - begin < 10
    assert wait_until_gone([nursery.pid], 10) == []
