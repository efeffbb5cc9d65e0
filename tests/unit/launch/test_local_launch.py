from __future__ import annotations

import atexit
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from sparkdl.collective import Coordinator
from sparkdl.errors import HangError, LaunchError, ParamError
from sparkdl.launch import RankContext, ranks, run_on_local_ranks
from sparkdl.launch.forkserver.forked_rank import ForkedRank
from sparkdl.launch.local_launch import gpus_of
from sparkdl.launch.task import barrier_task, supervisor
from sparkdl.launch.wire.channel import DriverChannel, RankMessage
from tests.flood import flooded
from tests.processes import listens_on, wait_until_gone, with_descendants


def test_local_ranks_get_the_visible_gpus_in_turn(tmp_path):
    assert gpus_of(1, 0, {}) is None
    assert gpus_of(1, 2, {}, tmp_path / "no driver") == ["2", "3"]
    for name in ("0000:3b:00.0", "0000:5e:00.0"):
        (tmp_path / name).mkdir()
    assert gpus_of(1, 1, {}, tmp_path) == ["1"]
    with pytest.raises(LaunchError, match=r"Rank 1 .* GPUs 2, 3, .* has 2\."):
        gpus_of(1, 2, {}, tmp_path)
    assert gpus_of(1, 1, {"CUDA_VISIBLE_DEVICES": "7,GPU-x"}) == ["GPU-x"]
    with pytest.raises(LaunchError, match="Rank 1 .* GPUs 2, 3, .*=7,8,9 names 3"):
        gpus_of(1, 2, {"CUDA_VISIBLE_DEVICES": "7,8,9"})
    with pytest.raises(ParamError, match="at least 1, got 0"):
        run_on_local_ranks(print, num_ranks=0)


def report_and_hang(context: RankContext) -> None:
    context.report({"pid": os.getpid()})
    threading.Event().wait(600)


def test_exception_in_a_callback_ends_all_ranks():
    pids = []

    def leave_when_both_run(rank, event):
        pids.append(event["pid"])
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_on_local_ranks(report_and_hang, num_ranks=2, on_event=leave_when_both_run)
    assert len(pids) == 2
    assert wait_until_gone(pids) == []


def faults_of_a_step(context: RankContext) -> int:
    """Page faults while 40 MiB are allocated, written and freed, as they were twice before."""
    import resource

    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [np.ones(10 << 20, np.uint8) for _ in range(4)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not that of glibc")
def test_memory_that_a_step_frees_is_there_for_the_next_one():
    # Without the rank's environment it is returned to the kernel, at 2,560 pages for each array.
    (faults,) = run_on_local_ranks(faults_of_a_step, num_ranks=1)
    assert faults < 500


left_open: list[TextIO] = []


def leave_work_for_the_end(context: RankContext, folder: Path) -> None:
    import ctypes
    import weakref

    left_open.append((folder / "left open").open("w"))
    left_open[0].write("flushed")
    thread = threading.Thread(target=lambda: threading.Event().wait(0.1) or print("a thread has ended"))
    thread.start()
    atexit.register(print, "an exit handler was called")
    weakref.finalize(context, print, "a finalizer was called")
    ctypes.CDLL(None).printf(b"C code has printed\n")


def test_a_rank_ends_as_an_interpreter_does(tmp_path):
    lines = []
    run_on_local_ranks(
        leave_work_for_the_end, tmp_path, num_ranks=1, on_log=lambda rank, line: lines.append(line)
    )
    assert sorted(lines) == [
        "C code has printed",
        "a finalizer was called",
        "a thread has ended",
        "an exit handler was called",
    ]
    assert (tmp_path / "left open").read_text() == "flushed"


def print_lines(context: RankContext, num_lines: int) -> int:
    for number in range(num_lines):
        print(number)
    return context.rank


def test_every_line_is_passed_on_before_the_values_are_returned():
    lines: dict[int, list[str]] = {0: [], 1: []}
    # More lines than the launcher can queue.
    values = run_on_local_ranks(
        print_lines, 20_000, num_ranks=2, on_log=lambda rank, line: lines[rank].append(line)
    )
    assert values == [0, 1]
    assert lines == {rank: [str(number) for number in range(20_000)] for rank in (0, 1)}


def wait_for_rank_one(context: RankContext) -> None:
    context.report({"pid": os.getpid()})
    if context.rank == 1:
        context.rendezvous.set("hangs", b"")
        threading.Event().wait(600)
    context.rendezvous.get("hangs", 120.0)
    context.communicator.barrier()


def test_rank_that_others_wait_for_is_named_with_its_stack(caplog: pytest.LogCaptureFixture):
    pids = []
    with pytest.raises(HangError, match="rank 0 has waited .* opening on 'world' for rank 1") as caught:
        run_on_local_ranks(
            wait_for_rank_one,
            num_ranks=2,
            hang_timeout_s=2.0,
            silence_timeout_s=120.0,  # on a busy machine heartbeats may be late
            on_event=lambda rank, event: pids.append(event["pid"]),
        )
    assert caught.value.rank == 1
    assert "in wait_for_rank_one" in caught.value.traceback_text
    assert caught.value.report in caplog.text
    assert "waiting in opening on 'world' for " in caught.value.report
    assert len(pids) == 2
    assert wait_until_gone(pids) == []


def test_error_of_one_task_ends_the_others(monkeypatch: pytest.MonkeyPatch):
    def start_all_but_one(*, name: str, **options: Any) -> ForkedRank:
        if name == "sparkdl-rank-1":
            raise LaunchError("this machine has no descriptors left")
        return ForkedRank(name=name, **options)

    monkeypatch.setattr(supervisor, "ForkedRank", start_all_but_one)
    with pytest.raises(LaunchError, match="no descriptors left"):
        run_on_local_ranks(sum_of_ranks, num_ranks=3)
    assert not any(thread.name.startswith("sparkdl-task-") for thread in threading.enumerate())


def test_errors_of_tasks_are_launch_errors(monkeypatch: pytest.MonkeyPatch):
    def run_out_of_descriptors(**_: Any) -> ForkedRank:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(supervisor, "ForkedRank", run_out_of_descriptors)
    with pytest.raises(LaunchError, match="Too many open files") as caught:
        run_on_local_ranks(sum_of_ranks, num_ranks=2)
    assert isinstance(caught.value.__cause__, OSError)


class FloodedCoordinator(Coordinator):
    """A coordinator whose port gets many connections without the secret."""

    def __enter__(self):
        self._flood = flooded(self.address.port, 5000)
        self._flood.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        self._flood.__exit__(*exception)
        super().__exit__(*exception)


def sum_of_ranks(context: RankContext) -> float:
    values = np.full(10, float(context.rank + 1), dtype=np.float32)
    context.communicator.allreduce(values)
    return float(values[-1])


def test_ranks_start_while_the_coordinators_port_is_flooded(monkeypatch):
    monkeypatch.setattr(barrier_task, "Coordinator", FloodedCoordinator)
    assert run_on_local_ranks(sum_of_ranks, num_ranks=3) == [6.0] * 3


def where_they_listen(context: RankContext, launcher: int) -> list[str]:
    context.communicator.barrier()
    found = sorted({host for _, host in listens_on(with_descendants(launcher))})
    context.communicator.barrier()
    return found


def test_ranks_and_launcher_listen_on_loopback_only():
    assert run_on_local_ranks(where_they_listen, os.getpid(), num_ranks=2) == [["127.0.0.1"]] * 2


def test_end_of_the_tasks_wakes_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    class PatientChannel(DriverChannel):
        def next_message(self, timeout_s: float) -> RankMessage | None:
            return super().next_message(60.0 if timeout_s else 0.0)

    monkeypatch.setattr(ranks, "DriverChannel", PatientChannel)
    begun = time.monotonic()
    assert run_on_local_ranks(lambda context: context.rank, num_ranks=2) == [0, 1]
    assert time.monotonic() - begun < 50.0
