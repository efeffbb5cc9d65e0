"""Stands for a Python worker of Spark in a task: starts and ends a rank as it is told by lines, and tells of it.

Run as ``python -m tests.unit.launch.nursery_worker MODULE...``; the rank does nothing until it is ended.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import pyspark

from sparkdl.launch.forkserver.forked_rank import ForkedRank
from sparkdl.launch.forkserver.kept import Kind, _leave_idle, prepare_rank
from sparkdl.launch.rank.environment import rank_environment
from sparkdl.launch.rank.pulse import StackFile


class Worker:
    """What the lines name."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._environment = rank_environment({}, gpus=None)
        self._rank: ForkedRank | None = None

    def prepare(self) -> None:
        """Begin what the next rank needs."""
        prepare_rank(Kind(self._environment, self._modules))

    def ask(self) -> int:
        """Ask for a rank; return whom."""
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
        return self._rank._nursery.pid

    def born(self) -> int | tuple[str, str]:
        """Wait for the rank; return its process id, or why there is none and what was printed."""
        assert self._rank is not None
        self._rank._is_settled.wait()
        return self._rank.refusal or self._rank.pid

    def where(self) -> tuple[str, str]:
        """Why what the rank is to be forked from cannot go on, and where it is."""
        assert self._rank is not None
        return self._rank.locate_nursery()

    def start(self) -> dict[str, Any]:
        """Start a rank."""
        return {"nursery": self.ask(), "rank": self.born()}

    def status(self) -> int | None:
        """Wait for the rank's end and return its exit status."""
        assert self._rank is not None
        self._rank.exited.wait(30)
        return self._rank.status

    def end(self) -> int | None:
        """End the rank, and keep what it was forked from."""
        assert self._rank is not None
        self._rank.end(grace_s=5.0)
        self._task.close()
        self._stacks.close()
        return self._rank.status

    def leave(self) -> None:
        """Keep nothing any more."""
        _leave_idle()


def main() -> None:
    """Serve until there are no more lines."""
    pyspark.TaskContext._getOrCreate()  # type: ignore[attr-defined]
    worker = Worker(tuple(sys.argv[1:]))
    for line in sys.stdin:
        print(json.dumps(getattr(worker, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
