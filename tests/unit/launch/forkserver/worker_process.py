"""A process like a Python worker of Spark in a task: starts and ends a rank on commands, one per line.

Run as ``python -m tests.unit.launch.forkserver.worker_process MODULE...``; the rank waits until it is ended.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from typing import Any

import psutil
import pyspark

from sparkdl.errors import LaunchError
from sparkdl.launch.forkserver.forked_rank import ForkedRank
from sparkdl.launch.forkserver.reuse import ForkserverKind, end_idle_forkservers, prepare_rank
from sparkdl.launch.rank.environment import rank_environment
from sparkdl.launch.rank.stacks import StackFile


class Worker:
    """The commands of the process, one per method."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._environment = rank_environment({}, gpus=None, num_threads=1)

    def prepare(self) -> None:
        """Start the forkserver for the next rank."""
        prepare_rank(ForkserverKind(self._environment, self._modules))

    def request(self) -> None:
        """Request a rank."""
        self._task, theirs = socket.socketpair()
        self._stacks = StackFile()
        with theirs:
            self._rank = ForkedRank(
                environment=self._environment,
                more_variables={},
                modules=self._modules,
                name="rank",
                task=theirs.fileno(),
                stacks=self._stacks.fd,
                inherited={},
                on_start=lambda: None,
                on_exit=lambda: None,
            )

    def started(self) -> int | tuple[str, str]:
        """Wait for the rank; return its process id, or why it could not start and the forkserver's output."""
        try:
            return self._rank.pid
        except LaunchError:
            return self._rank.refusal

    def examine(self) -> tuple[str, str]:
        """Return the reason why the forkserver cannot continue, and its output with its stacks."""
        return self._rank.examine_forkserver()

    def start(self) -> dict[str, Any]:
        """Start a rank; return the process ids of its forkserver and of the rank."""
        self.request()
        rank = self.started()
        return {"forkserver": psutil.Process(rank).ppid(), "rank": rank}

    def status(self) -> int | None:
        """Wait for the rank's end and return its exit status."""
        self._rank.exited.wait(30)
        return self._rank.status

    def end(self) -> int | None:
        """End the rank and keep its forkserver; return the rank's exit status."""
        self._rank.end(grace_s=5.0)
        self._task.close()
        self._stacks.close()
        return self._rank.status

    def disconnect(self) -> None:
        """Disconnect from the kept forkserver."""
        end_idle_forkservers(0.0)
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()


def main() -> None:
    """Run commands until the end of the input."""
    pyspark.TaskContext._getOrCreate()  # type: ignore[attr-defined]
    worker = Worker(tuple(sys.argv[1:]))
    for line in sys.stdin:
        print(json.dumps(getattr(worker, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
