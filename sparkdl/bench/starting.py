"""Starts the ranks of a benchmark on this machine, without Spark: a coordinator here and a fresh process per rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from sparkdl.collective import Coordinator, Deadline, PmiServer, RendezvousClient, new_secret, pmi_environment
from sparkdl.errors import RankError

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks of one contender measure.

    Attributes:
        contender: a key of :data:`sparkdl.bench.contenders.CONTENDERS`.
        world_size: how many ranks.
        sizes: in bytes.
        seconds: how long to measure each size, about.
        mpi: the ranks stand in one MPI world.
        variables: environment variables for the ranks.
    """

    contender: str
    world_size: int
    sizes: Sequence[int]
    seconds: float
    mpi: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


def run_task(task: Task, *, timeout_s: float) -> dict[int, list[float]]:
    """The seconds of every repetition of every size; the slowest rank's in each.

    Raises:
        RankError: if a rank failed; it holds what that rank wrote to standard error.
        TimeoutError: if the ranks take longer than ``timeout_s``.
    """
    secret = new_secret()
    with ExitStack() as stack:
        coordinator = stack.enter_context(Coordinator(secret=secret, world_size=task.world_size))
        processes = [
            stack.enter_context(_start(task, rank, coordinator, secret, stack))
            for rank in range(task.world_size)
        ]
        stack.callback(_end, processes)
        address = coordinator.address
        for rank, process in enumerate(processes):
            assert process.stdin is not None
            message = {"contender": task.contender, "rank": rank, "world_size": task.world_size}
            message |= {"sizes": list(task.sizes), "seconds": task.seconds, "secret": secret.hex()}
            process.stdin.write(json.dumps(message | {"hosts": address.hosts, "port": address.port}))
            process.stdin.close()
            process.stdin = None
        outputs = _collect(processes, timeout_s)
    by_rank = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        size: [max(times) for times in zip(*(rank[str(size)] for rank in by_rank), strict=True)]
        for size in task.sizes
    }


def _start(
    task: Task, rank: int, coordinator: Coordinator, secret: bytes, stack: ExitStack
) -> subprocess.Popen[str]:
    variables = {**os.environ, **task.variables, "OMP_NUM_THREADS": "1"}
    inherited: list[int] = []
    if task.mpi:
        ours, theirs = socket.socketpair()
        stack.callback(theirs.close)
        client = stack.enter_context(RendezvousClient.connect(coordinator.address, secret, _START_TIMEOUT_S))
        hosts = [0] * task.world_size
        stack.enter_context(
            PmiServer(ours, client, rank, task.world_size, host_of_rank=hosts, timeout_s=_START_TIMEOUT_S)
        )
        variables |= pmi_environment(theirs.fileno(), rank, task.world_size)
        inherited.append(theirs.fileno())
    return subprocess.Popen(
        [sys.executable, "-m", "sparkdl.bench.rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        pass_fds=inherited,
    )


def _collect(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    deadline = Deadline(timeout_s)
    outputs = []
    for rank, process in enumerate(processes):
        try:
            output, errors = process.communicate(timeout=deadline.remaining_s())
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"rank {rank} of the benchmark did not end within {timeout_s:g} s") from error
        if process.returncode != 0:
            last_line = errors.strip().rpartition("\n")[2]
            raise RankError(
                f"rank {rank} of the benchmark ended with status {process.returncode}: {last_line}",
                rank=rank,
                host="localhost",
                traceback_text=errors,
            )
        outputs.append(output)
    return outputs


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
