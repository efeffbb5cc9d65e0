"""One process that ranks are forked from, for all Python workers of an executor."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparkdl.launch.forkserver import start
from sparkdl.launch.forkserver.client import NurseryClients
from tests.processes import is_running, wait_until_gone


class Worker:
    """A process like a Python worker in a Spark task; all of them are children of this one."""

    def __init__(self, *modules: str, **variables: str) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.launch.nursery_worker", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **variables},
        )

    def tell(self, order: str) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """What came of it."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def do(self, order: str) -> Any:
        """Tell and hear."""
        self.tell(order)
        return self.hear()


@contextmanager
def workers(*all_modules: tuple[str, ...], **variables: str) -> Iterator[list[Worker]]:
    started = [Worker(*modules, **variables) for modules in all_modules]
    try:
        yield started
    finally:
        for worker in started:
            worker.process.kill()
            worker.process.communicate()


def test_workers_of_an_executor_share_a_process_which_ends_with_the_last_of_them() -> None:
    with workers(("wave",), ("wave",)) as (first, second):
        mine, other = first.do("start"), second.do("start")
        assert mine["nursery"] == other["nursery"]
        assert mine["rank"] != other["rank"]
        assert [first.do("end"), second.do("end")] == [-signal.SIGTERM] * 2
        first.do("leave")
        assert second.do("start")["nursery"] == mine["nursery"]
        second.do("end")
        second.do("leave")
        assert wait_until_gone([mine["nursery"]], 10) == []


def test_what_one_worker_prepares_serves_the_others_and_is_prepared_once() -> None:
    with workers(("colorsys",), ("colorsys",)) as (first, second):
        first.do("prepare")
        second.do("prepare")
        children = Path(f"/proc/{second.process.pid}/task/{second.process.pid}/children").read_text()
        assert children == ""
        assert first.do("start")["nursery"] == second.do("start")["nursery"]


@pytest.mark.parametrize("is_stopped", [False, True], ids=["at once", "with news that it has not read"])
def test_a_worker_that_is_killed_takes_its_rank_alone(is_stopped: bool) -> None:
    with workers(("wave",), ("wave",)) as (first, second):
        lost, kept = first.do("start"), second.do("start")
        if is_stopped:
            os.kill(first.process.pid, signal.SIGSTOP)
            os.kill(lost["rank"], signal.SIGKILL)
        first.process.kill()
        assert wait_until_gone([lost["rank"]], 10) == []
        assert is_running(kept["rank"])
        os.kill(kept["rank"], signal.SIGTERM)
        assert second.do("status") == -signal.SIGTERM
        second.do("end")
        assert second.do("start")["nursery"] == lost["nursery"]


def test_ranks_of_all_workers_end_with_the_process_that_they_were_forked_from() -> None:
    with workers(("wave",), ("wave",)) as both:
        ranks = [worker.do("start") for worker in both]
        os.kill(ranks[0]["nursery"], signal.SIGKILL)
        assert [worker.do("status") for worker in both] == [-signal.SIGKILL] * 2
        assert wait_until_gone([rank["rank"] for rank in ranks], 10) == []
        assert [worker.do("end") for worker in both] == [-signal.SIGKILL] * 2
        again = [worker.do("start")["nursery"] for worker in both]
        assert again[0] == again[1] != ranks[0]["nursery"]


def test_a_worker_with_other_values_of_the_variables_has_a_process_of_its_own() -> None:
    with workers(("wave",), OF_ALL="1") as (first,), workers(("wave",), OF_ALL="2") as (second,):
        assert first.do("start")["nursery"] != second.do("start")["nursery"]


def test_every_worker_is_told_the_last_words_of_what_dies_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "late_library.py").write_text(
        "import os, time\n"
        f"while not os.path.exists({str(tmp_path / 'both')!r}): time.sleep(0.01)\n"
        "print('no such processor', flush=True)\nos.abort()\n"
    )
    path = f"{tmp_path}:{Path.cwd()}"
    with workers(("late_library",), ("late_library",), PYTHONPATH=path) as both:
        asked = [worker.do("ask") for worker in both]
        assert asked[0] == asked[1]
        (tmp_path / "both").touch()
        refusals = [worker.do("born") for worker in both]
    assert sorted(why for why, _ in refusals) == [
        "the process that imports for it ended",
        "the process that imports for it was ended by SIGABRT",
    ]
    assert all("no such processor" in said and "late_library" in said for _, said in refusals)


def test_every_worker_is_told_that_what_is_killed_while_it_imports_may_have_lacked_memory(
    tmp_path: Path,
) -> None:
    (tmp_path / "late_library.py").write_text("import time\ntime.sleep(600)\n")
    path = f"{tmp_path}:{Path.cwd()}"
    with workers(("late_library",), ("late_library",), PYTHONPATH=path) as both:
        (nursery,) = {worker.do("ask") for worker in both}
        os.kill(nursery, signal.SIGKILL)
        assert sorted(worker.do("born")[0] for worker in both) == [
            "the process that imports for it ended without a word (out of memory?)",
            "the process that imports for it was ended by SIGKILL (out of memory?)",
        ]


def test_a_worker_that_leaves_while_it_imports_does_not_end_it_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "late_library.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    )
    path = f"{tmp_path}:{Path.cwd()}"
    with workers(("late_library",), ("late_library",), PYTHONPATH=path) as (first, second):
        first.do("prepare")
        nursery = second.do("ask")
        first.process.kill()
        first.process.wait()
        (tmp_path / "go").touch()
        assert is_running(second.do("born"))
        second.do("end")
        assert second.do("start")["nursery"] == nursery


def test_a_worker_that_leaves_while_a_library_holds_the_interpreter_ends_only_what_nobody_shares(
    tmp_path: Path,
) -> None:
    (tmp_path / "late_library.py").write_text(
        f"import ctypes\nopen({str(tmp_path / 'began')!r}, 'w').close()\nctypes.PyDLL(None).sleep(60)\n"
    )
    path = f"{tmp_path}:{Path.cwd()}"
    with workers(("late_library",), ("late_library",), PYTHONPATH=path) as both:
        (nursery,) = {worker.do("ask") for worker in both}
        while not (tmp_path / "began").exists():
            threading.Event().wait(0.02)
        both[0].do("end")
        assert is_running(nursery)
        both[1].do("end")
        assert wait_until_gone([nursery], 10) == []


def test_who_gave_up_waiting_is_told_where_it_was_and_the_others_get_their_rank(tmp_path: Path) -> None:
    (tmp_path / "late_library.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'began')!r}, 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    )
    path = f"{tmp_path}:{Path.cwd()}"
    with workers(("late_library",), ("late_library",), PYTHONPATH=path) as (first, second):
        assert first.do("ask") == second.do("ask")
        while not (tmp_path / "began").exists():
            threading.Event().wait(0.02)
        state, said = first.do("where")
        assert state == ""
        assert "late_library.py" in said
        first.do("end")
        (tmp_path / "go").touch()
        assert is_running(second.do("born"))


def test_a_rank_that_is_stuck_in_its_fork_holds_up_no_other(tmp_path: Path) -> None:
    (tmp_path / "late_library.py").write_text(
        "import os, time\n"
        "def hang_in_first():\n"
        f"    try: os.mkdir({str(tmp_path / 'first')!r})\n"
        "    except FileExistsError: return\n"
        "    time.sleep(600)\n"
        "os.register_at_fork(after_in_child=hang_in_first)\n"
    )
    path = f"{tmp_path}:{Path.cwd()}"
    with workers(("late_library",), ("late_library",), PYTHONPATH=path) as (first, second):
        stuck = first.do("start")["rank"]
        assert is_running(second.do("start")["rank"])
        assert first.do("end") == -signal.SIGTERM
        assert wait_until_gone([stuck], 10) == []


def test_ranks_of_different_gpus_do_not_look_for_the_same_process() -> None:
    names = {start._name({"CUDA_VISIBLE_DEVICES": gpu}, ()) for gpu in ("0", "1")}
    assert len(names) == 2


def test_a_name_whose_owner_lets_nobody_in_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "_JOIN_TIMEOUT_S", 0.2)
    environment = {**os.environ, "OF_ALL": "let nobody in"}
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocking,
    ):
        taken.bind(start._name(environment, ()))
        taken.listen(0)
        knocking.connect(taken.getsockname())  # so the queue is full
        assert start.begin_nursery(environment, ()) is None
        nursery = start.reach_nursery(environment, ())
    assert is_running(nursery.pid)
    nursery.leave()


def test_where_no_name_can_be_had_each_worker_starts_a_process_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "_JOIN_TIMEOUT_S", 600.0)
    # A name in a folder that does not exist is refused, as a sandbox refuses all.
    monkeypatch.setattr(start, "_name", lambda environment, modules: "/nonexistent/name")
    both = [
        start.begin_nursery(dict(os.environ), ()),
        start.reach_nursery(dict(os.environ), ()),
    ]
    for nursery in both:
        assert nursery is not None
        nursery.leave()


def test_a_process_that_ends_and_so_can_start_no_thread_leaves_what_it_kept() -> None:
    script = (
        "import os, threading\n"
        "from sparkdl.launch.forkserver.kept import Kind, prepare_rank\n"
        "prepare_rank(Kind(dict(os.environ), ()))\n"
        "def refuse(thread): raise RuntimeError('no new thread at interpreter shutdown')\n"
        "threading.Thread.start = refuse\n"  # as Python does since 3.12
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_workers_that_come_and_go_at_the_same_time_always_get_their_rank() -> None:
    num_rounds = 15
    with workers((), (), ()) as crowd:
        for worker in crowd:
            for _ in range(num_rounds):
                for order in ("start", "end", "leave"):
                    worker.tell(order)
        for worker in crowd:
            for _ in range(num_rounds):
                started = worker.hear()
                assert isinstance(started["rank"], int)
                assert worker.hear() < 0
                worker.hear()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another user")
def test_a_process_of_another_user_is_not_let_in() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"\0sparkdl-test-{os.getpid()}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(name)
    clients = NurseryClients(theirs, door)
    stranger = os.fork()
    if stranger == 0:
        try:
            os.setuid(65534)
            knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            knocking.connect(name)
            os._exit(len(knocking.recv(10)))  # 0: the connection was closed
        finally:
            os._exit(1)  # whatever happens, this is not to go on as the tests
    assert clients.await_any(0, timeout_ms=10_000) == []
    assert os.waitpid(stranger, 0)[1] == 0
    assert len(list(clients)) == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocking:
        knocking.connect(name)
        clients.await_any(0, timeout_ms=10_000)
        assert len(list(clients)) == 2
    ours.close()
    clients.forget()
