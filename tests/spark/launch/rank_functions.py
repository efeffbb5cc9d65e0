"""Functions that the launch tests run on ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.collective import current_communicator
from sparkdl.launch import RankContext
from sparkdl.launch.forkserver.client import peer_process
from tests.processes import listens_on, runs, with_descendants

Launch = Callable[..., list[Any]]
"""Runs a function with arguments on ranks, and returns their values."""


def describe(context: RankContext, greeting: str, *, suffix: str = "") -> dict[str, Any]:
    """Facts about a rank; its executor is the parent of the task's Python worker, and there is one per executor."""
    stat = Path(f"/proc/{_worker()}/stat").read_text()
    return {
        "rank": context.rank,
        "world_size": context.world_size,
        "pid": os.getpid(),
        "text": greeting + suffix,
        "variable": os.environ.get("SPARKDL_TEST"),
        "forkserver": os.getppid(),
        "executor": int(stat.rsplit(")", 1)[1].split()[1]),
    }


def pids_in(folder: Path) -> list[int]:
    """The process ids that ranks have written to a folder: into files, or as the names of files."""
    written = [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]
    return written + [int(file.name) for file in folder.iterdir() if file.name.isdigit()]


def where_they_listen(context: RankContext, driver: int) -> list[str]:
    """The addresses on which the driver and its descendants except Java listen while ranks run."""
    context.communicator.barrier()
    processes = {pid for pid in with_descendants(driver) if not runs(pid, "java")}
    assert os.getpid() in processes
    found = sorted({host for _, host in listens_on(processes)})
    context.communicator.barrier()
    return found


def sum_of_ranks(context: RankContext) -> float:
    values = np.full(1000, float(context.rank + 1), dtype=np.float32)
    context.communicator.allreduce(values)
    return float(values[-1])


def fail_on(context: RankContext, culprit: int) -> None:
    if context.rank == culprit:
        raise LookupError(f"rank {culprit} looked in vain")
    context.communicator.barrier()


def kill_on(context: RankContext, culprit: int) -> None:
    context.communicator.barrier()
    if context.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    context.communicator.barrier()


def kill_own_worker_on(context: RankContext, culprit: int, folder: str) -> None:
    """Kill the Python worker of one rank, as when an executor is lost. Writes a file per rank process."""
    Path(folder, str(os.getpid())).touch()
    context.communicator.barrier()
    if context.rank == culprit:
        os.kill(_worker(), signal.SIGKILL)
    threading.Event().wait(60)


def hang(context: RankContext, folder: str) -> None:
    """Start a child process, write both pids to a file, and never return."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, f"{context.rank}.pids").write_text(f"{os.getpid()} {child.pid}")
    context.report({"hanging": context.rank})
    threading.Event().wait(600)


def hang_on_rank(folder: str) -> None:
    """Write the pid of a Runner's rank to a file, and never return."""
    communicator = current_communicator()
    assert communicator is not None
    Path(folder, f"{communicator.rank}.pids").write_text(str(os.getpid()))
    threading.Event().wait(600)


def wait_for_file(context: RankContext, path: str) -> None:
    context.report({"waiting": context.rank})
    pause = threading.Event()
    while not Path(path).exists():
        pause.wait(0.05)


def say_and_wait(context: RankContext, seconds: float) -> int:
    print(f"from rank {context.rank}")
    threading.Event().wait(seconds)
    return context.rank


def print_and_report(context: RankContext, num_lines: int) -> None:
    for number in range(num_lines):
        print(f"line {number} of rank {context.rank}")
    context.report({"rank": context.rank, "loss": 0.5})


def make_bytes(context: RankContext, num_bytes: int) -> bytes | None:
    return bytes(num_bytes) if context.rank == 0 else None


def mpi_world(context: RankContext) -> tuple[int, int, float]:
    from mpi4py import MPI

    values = np.full(10, context.rank + 1.0, dtype=np.float64)
    context.communicator.allreduce(values)
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), float(values[0])


def sleep_on(context: RankContext, culprit: int, folder: str) -> None:
    """Let one rank sleep while the others wait for it in a process set. Writes a file per rank process."""
    Path(folder, str(os.getpid())).touch()
    everybody = context.communicator.split(range(context.world_size), "all")
    if context.rank == culprit:
        threading.Event().wait(600)
    everybody.allreduce(np.ones(4), name="gradients")


def stop_own_worker_on(context: RankContext, culprit: int, folder: str) -> None:
    """Stop all threads of one rank's Python worker. Writes a file per rank process."""
    Path(folder, str(os.getpid())).touch()
    context.communicator.barrier()
    if context.rank == culprit:
        worker = _worker()
        Path(folder, "worker").write_text(str(worker))
        os.kill(worker, signal.SIGSTOP)
    threading.Event().wait(600)


def fail_while_the_worker_of_another_is_stopped(context: RankContext, folder: str) -> None:
    """Raise on rank 0 while rank 1's Python worker, which would have to end rank 1, is stopped with all its threads."""
    Path(folder, str(os.getpid())).touch()
    context.communicator.barrier()
    if context.rank == 1:
        worker = _worker()
        Path(folder, "worker").write_text(str(worker))
        os.kill(worker, signal.SIGSTOP)
        context.rendezvous.set("stopped", b"")
        threading.Event().wait(600)
    context.rendezvous.get("stopped", 60)
    raise ValueError("rank 0 failed")


def _worker() -> int:
    """The Python worker at the other end of one of this rank's sockets.

    Another worker of the executor may have started this process's parent.
    """
    for link in Path("/proc/self/fd").iterdir():
        if not os.path.realpath(link).rpartition("/")[2].startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as connection:
            worker = peer_process(connection) if connection.family == socket.AF_UNIX else None
            if worker is not None and b"pyspark.daemon" in Path(f"/proc/{worker}/cmdline").read_bytes():
                return worker
    raise AssertionError("no socket of this rank leads to a Python worker")


def tell_and_sleep(context: RankContext) -> None:
    context.progress()
    threading.Event().wait(600)


def linger_on(context: RankContext, late: int, seconds: float) -> int:
    """Return late on one rank, when the others have returned."""
    context.communicator.barrier()
    if context.rank == late:
        threading.Event().wait(seconds)
    return context.rank


def count_threads(context: RankContext) -> tuple[int, str]:
    """The number of torch's threads, and the variable for libraries that are yet to be imported."""
    import torch

    context.communicator.barrier()
    return torch.get_num_threads(), os.environ["RAYON_NUM_THREADS"]
