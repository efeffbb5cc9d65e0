"""The tasks of a launch as threads of this process."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

from sparkdl.collective import Deadline
from sparkdl.launch.stage import Stage
from sparkdl.launch.task.barrier_task import RankTask, run_barrier_task
from sparkdl.rendezvous.addresses import LOOPBACK

if TYPE_CHECKING:
    from sparkdl.launch.task.program import Program
    from sparkdl.launch.wire.spec import LaunchSpec


class LocalStage(Stage):
    """The tasks of a launch as threads of this process.

    Args:
        spec: spec of the launch.
        gpus: addresses of the GPUs of each rank; None for a rank that sees those that this process sees.
        program: what the ranks run instead of the function of the spec; None to run that.

    Attributes:
        num_ranks: number of ranks.
        error: the first exception that ended a task; None without one.
        spark: None, as there is no session.
    """

    error: Exception | None = None

    def __init__(
        self, spec: LaunchSpec, gpus: Sequence[Sequence[str] | None], program: Program | None = None
    ) -> None:
        self.num_ranks = spec.num_ranks
        self.spark = None
        self._spec, self._program = spec, program
        self._gathered = [""] * spec.num_ranks
        self._barrier = threading.Barrier(spec.num_ranks)
        self._bodies: defaultdict[tuple[int, str], list[bytes]] = defaultdict(list)
        self._running = set(range(spec.num_ranks))
        self._wake: Callable[[], None] | None = None
        self._threads = [
            threading.Thread(
                target=self._run_task, args=(rank, gpus[rank]), name=f"sparkdl-task-{rank}", daemon=True
            )
            for rank in range(spec.num_ranks)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        """Whether a task runs."""
        return bool(self._running)

    def call_at_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once a task has failed or all have ended, from the thread of a task, or from this one."""
        self._wake = wake
        if self.error is not None or not self.running:
            wake()

    def cancel(self, *, timeout_s: float) -> None:
        """Wait for the tasks, which the channel has cancelled, until they have ended or the time is over."""
        self._barrier.abort()
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.join(deadline.remaining_s())

    def outcomes(self) -> list[tuple[int, str, int]]:
        """Rank, kind and number of chunks of everything that the ended tasks yielded."""
        return [
            (rank, kind, len(bodies))
            for (rank, kind), bodies in self._bodies.items()
            if rank not in self._running
        ]

    def fetch(self, rank: int, kind: str, num_chunks: int, into: IO[bytes]) -> None:  # noqa: ARG002 - for Spark
        """Write the body of one outcome into a file, and release it."""
        for body in self._bodies.pop((rank, kind), ()):
            into.write(body)

    def close(self) -> None:
        """Release the outcomes."""
        self._bodies.clear()

    def _run_task(self, rank: int, gpus: Sequence[str] | None) -> None:
        task = RankTask(
            rank=rank,
            hosts=[LOOPBACK] * self.num_ranks,
            gpus=gpus,
            cpus=1,
            all_gather=lambda text: self._gather(rank, text),
            program=self._program,
        )
        try:
            for kind, _, body in run_barrier_task(self._spec, task):
                self._bodies[rank, kind].append(body)
        except Exception as error:
            self.error = self.error or error
            self._barrier.abort()
        finally:
            self._running.discard(rank)
            if self._wake is not None and (self.error is not None or not self._running):
                self._wake()

    def _gather(self, rank: int, text: str) -> list[str]:
        self._gathered[rank] = text
        self._barrier.wait()
        return list(self._gathered)
