"""One forkserver shared by all Python workers of an executor."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparkdl.launch.forkserver import start
from sparkdl.launch.forkserver.client import ForkserverClients
from tests.collective.eventually import eventually
from tests.processes import is_running, wait_until_gone


class Worker:
    """A process like a Python worker in a Spark task; all workers are children of the test process."""

    def __init__(self, *modules: str, **variables: str) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.launch.forkserver.worker_process", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **variables},
        )

    def send(self, command: str) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Receive the result of a command."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def do(self, command: str) -> Any:
        """Run a command and return its result."""
        self.send(command)
        return self.receive()


@contextmanager
def workers(*all_modules: tuple[str, ...], **variables: str) -> Iterator[list[Worker]]:
    started = [Worker(*modules, **variables) for modules in all_modules]
    try:
        yield started
    finally:
        for worker in started:
            worker.process.kill()
            worker.process.communicate()


@contextmanager
def two_importers(folder: Path, source: str) -> Iterator[list[Worker]]:
    """Two workers, whose forkserver imports a library with this source."""
    (folder / "late_library.py").write_text(source)
    with workers(("late_library",), ("late_library",), PYTHONPATH=f"{folder}:{Path.cwd()}") as both:
        yield both


def forkserver_of(both: list[Worker]) -> int:
    """The process id of the only forkserver that two workers have started."""
    (child,) = [child for worker in both for child in psutil.Process(worker.process.pid).children()]
    return child.pid


def until(event: Path) -> str:
    """The source of a library whose import lasts until a file exists."""
    return f"import os, time\nwhile not os.path.exists({str(event)!r}): time.sleep(0.01)\n"


def test_workers_of_an_executor_share_a_forkserver_which_ends_with_the_last_of_them() -> None:
    with workers(("wave",), ("wave",)) as (first, second):
        mine, other = first.do("start"), second.do("start")
        assert mine["forkserver"] == other["forkserver"]
        assert mine["rank"] != other["rank"]
        assert [first.do("end"), second.do("end")] == [-signal.SIGTERM] * 2
        first.do("disconnect")
        assert second.do("start")["forkserver"] == mine["forkserver"]
        second.do("end")
        second.do("disconnect")
        assert wait_until_gone([mine["forkserver"]]) == []


def test_forkserver_that_one_worker_prepares_is_used_by_the_others() -> None:
    with workers(("colorsys",), ("colorsys",)) as (first, second):
        first.do("prepare")
        second.do("prepare")
        assert psutil.Process(second.process.pid).children() == []
        assert first.do("start")["forkserver"] == second.do("start")["forkserver"]


@pytest.mark.parametrize("is_stopped", [False, True], ids=["at once", "with unread messages"])
def test_rank_of_a_killed_worker_ends_and_the_forkserver_ends_with_the_last_worker(is_stopped: bool) -> None:
    with workers(("wave",), ("wave",)) as (first, second):
        lost, kept = first.do("start"), second.do("start")
        if is_stopped:
            os.kill(first.process.pid, signal.SIGSTOP)
            os.kill(lost["rank"], signal.SIGKILL)
        first.process.kill()
        assert wait_until_gone([lost["rank"]]) == []
        assert is_running(kept["rank"])
        os.kill(kept["rank"], signal.SIGTERM)
        assert second.do("status") == -signal.SIGTERM
        second.do("end")
        again = second.do("start")
        assert again["forkserver"] == lost["forkserver"]
        second.process.kill()
        assert wait_until_gone([again["rank"], again["forkserver"]]) == []


def test_ranks_of_all_workers_end_with_their_forkserver() -> None:
    with workers(("wave",), ("wave",)) as both:
        ranks = [worker.do("start") for worker in both]
        os.kill(ranks[0]["forkserver"], signal.SIGKILL)
        assert [worker.do("status") for worker in both] == [-signal.SIGKILL] * 2
        assert wait_until_gone([rank["rank"] for rank in ranks]) == []
        assert [worker.do("end") for worker in both] == [-signal.SIGKILL] * 2
        again = [worker.do("start")["forkserver"] for worker in both]
        assert again[0] == again[1] != ranks[0]["forkserver"]


def test_worker_with_other_values_of_variables_has_its_own_forkserver() -> None:
    with workers(("wave",), OF_ALL="1") as (first,), workers(("wave",), OF_ALL="2") as (second,):
        assert first.do("start")["forkserver"] != second.do("start")["forkserver"]


def test_every_worker_gets_the_last_output_of_a_forkserver_that_died_during_imports(tmp_path: Path) -> None:
    source = f"{until(tmp_path / 'both')}print('no such processor', flush=True)\nos.abort()\n"
    with two_importers(tmp_path, source) as both:
        for worker in both:
            worker.do("request")
        assert is_running(forkserver_of(both))
        (tmp_path / "both").touch()
        refusals = [worker.do("started") for worker in both]
    assert sorted(why for why, _ in refusals) == [
        "the forkserver ended",
        "the forkserver was ended by SIGABRT",
    ]
    assert all("no such processor" in said and "late_library" in said for _, said in refusals)


def test_every_worker_learns_that_a_killed_forkserver_may_have_lacked_memory(tmp_path: Path) -> None:
    with two_importers(tmp_path, "import time\ntime.sleep(600)\n") as both:
        for worker in both:
            worker.do("request")
        os.kill(forkserver_of(both), signal.SIGKILL)
        assert sorted(worker.do("started")[0] for worker in both) == [
            "the forkserver ended without output (out of memory?)",
            "the forkserver was ended by SIGKILL (out of memory?)",
        ]


def test_worker_that_is_killed_during_imports_does_not_end_the_forkserver_of_others(tmp_path: Path) -> None:
    with two_importers(tmp_path, until(tmp_path / "go")) as (first, second):
        first.do("prepare")
        second.do("request")
        forkserver = forkserver_of([first, second])
        first.process.kill()
        first.process.wait()
        (tmp_path / "go").touch()
        assert is_running(second.do("started"))
        second.do("end")
        assert second.do("start")["forkserver"] == forkserver


def test_forkserver_with_a_held_interpreter_is_killed_only_by_the_last_worker(tmp_path: Path) -> None:
    began = tmp_path / "began"
    source = f"import ctypes\nopen({str(began)!r}, 'w').close()\nctypes.PyDLL(None).sleep(60)\n"
    with two_importers(tmp_path, source) as both:
        for worker in both:
            worker.do("request")
        forkserver = forkserver_of(both)
        assert eventually(began.exists, timeout_s=60)
        both[0].do("end")
        assert is_running(forkserver)
        both[1].do("end")
        assert wait_until_gone([forkserver]) == []


def test_worker_that_stops_waiting_gets_the_stack_and_the_others_get_their_ranks(tmp_path: Path) -> None:
    began, go = tmp_path / "began", tmp_path / "go"
    with two_importers(tmp_path, f"open({str(began)!r}, 'w').close()\n{until(go)}") as (first, second):
        first.do("request")
        second.do("request")
        assert is_running(forkserver_of([first, second]))
        assert eventually(began.exists, timeout_s=60)
        state, said = first.do("examine")
        assert state == ""
        assert "late_library.py" in said
        first.do("end")
        go.touch()
        assert is_running(second.do("started"))


def test_rank_that_hangs_in_its_fork_does_not_block_others(tmp_path: Path) -> None:
    source = (
        "import os, time\n"
        "def hang_in_first():\n"
        f"    try: os.mkdir({str(tmp_path / 'first')!r})\n"
        "    except FileExistsError: return\n"
        "    time.sleep(600)\n"
        "os.register_at_fork(after_in_child=hang_in_first)\n"
    )
    with two_importers(tmp_path, source) as (first, second):
        stuck = first.do("start")["rank"]
        assert is_running(second.do("start")["rank"])
        assert first.do("end") == -signal.SIGTERM
        assert wait_until_gone([stuck]) == []


def test_ranks_with_different_gpus_have_different_forkservers() -> None:
    started = [
        start.start_if_first({**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, ()) for gpu in ("0", "1", "1")
    ]
    assert [forkserver is not None for forkserver in started] == [True, True, False]
    for forkserver in started[:2]:
        forkserver.disconnect()


def test_socket_name_whose_owner_accepts_no_connection_is_waited_for_with_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "JOIN_TIMEOUT_S", 0.2)
    environment = {**os.environ, "OF_ALL": "no connections"}
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connecting,
    ):
        taken.bind(start.socket_name(environment, ()))
        taken.listen(0)
        connecting.connect(taken.getsockname())  # fills the queue
        assert start.start_if_first(environment, ()) is None
        forkserver = start.connect_or_start(environment, ())
    assert is_running(forkserver.pid)
    forkserver.disconnect()


def test_worker_that_cannot_bind_names_starts_a_forkserver_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "JOIN_TIMEOUT_S", 600.0)
    # Binding a name in a missing folder fails, as a sandbox may refuse all names.
    monkeypatch.setattr(start, "socket_name", lambda environment, modules: "/nonexistent/name")
    for begin in (start.start_if_first, start.connect_or_start):
        forkserver = begin(dict(os.environ), ())
        assert is_running(forkserver.pid)
        forkserver.disconnect()


def test_process_that_exits_and_can_start_no_thread_disconnects() -> None:
    script = (
        "import os, threading\n"
        "from sparkdl.launch.forkserver.reuse import ForkserverKind, prepare_rank\n"
        "prepare_rank(ForkserverKind(dict(os.environ), ()))\n"
        "def refuse(thread): raise RuntimeError('no new thread at interpreter shutdown')\n"
        "threading.Thread.start = refuse\n"  # Python does so since 3.12
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=500,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_workers_that_connect_and_disconnect_at_the_same_time_always_get_their_rank() -> None:
    num_rounds = 4
    with workers((), (), ()) as crowd:
        for worker in crowd:
            for _ in range(num_rounds):
                for command in ("start", "end", "disconnect"):
                    worker.send(command)
        for worker in crowd:
            for _ in range(num_rounds):
                started = worker.receive()
                assert isinstance(started["rank"], int)
                assert worker.receive() < 0
                worker.receive()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another user")
def test_process_of_another_user_cannot_connect() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"\0sparkdl-test-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name)
    clients = ForkserverClients(theirs, listener)
    stranger = os.fork()
    if stranger == 0:
        try:
            os.setuid(65534)
            connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connecting.connect(name)
            os._exit(len(connecting.recv(10)))  # 0: the connection was closed
        finally:
            os._exit(1)  # the fork must not return into the tests
    assert clients.poll(0, timeout_ms=10_000) == []
    assert os.waitpid(stranger, 0)[1] == 0
    assert len(list(clients)) == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connecting:
        connecting.connect(name)
        clients.poll(0, timeout_ms=10_000)
        assert len(list(clients)) == 2
    ours.close()
    clients.close_in_rank()
