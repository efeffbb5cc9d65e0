"""Converts the outcomes of the tasks to the ranks' values; :mod:`.failures` raises if a rank failed."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from sparkdl.errors import ExecutorsLostError, LaunchError, SparkdlError
from sparkdl.launch.failures import raise_for_failures, were_ranks_lost
from sparkdl.launch.stage import Stage
from sparkdl.launch.wire.outcome import Failure
from sparkdl.launch.wire.spec import HangLimits

RESULTS_BYTES = 64 << 20
"""Results up to this size are assembled in memory, larger ones in a temporary file."""


def collect(
    stage: Stage,
    received: list[Failure],
    on_log: Callable[[int, str], None],
    limits: HangLimits,
) -> list[Any]:
    """Fetch the values of all ranks, in order of rank.

    Args:
        stage: tasks that have ended, or were cancelled.
        received: failures that the driver received while the tasks ran.
        on_log: called with rank and line for each line that could not reach the driver before.
        limits: times after which a rank counts as hanging.

    Raises:
        LaunchError: if the ranks could not be started, or were lost with their executors.
        LaunchCancelledError: if the stage was cancelled in Spark.
        ClusterLostError: if Spark's application ended.
        RankError: if a rank failed; ``__cause__`` is the rank's exception, with the causes of that exception.
        HangError: if the tasks found that a rank hangs.
    """
    num_ranks = stage.num_ranks
    try:
        rows = _Rows(stage)
        for rank in rows.ranks("log"):
            for line in rows.read("log", rank).decode("utf-8", "replace").splitlines():
                on_log(rank, line)
        for rank in rows.ranks("refused"):
            reason = rows.read("refused", rank).decode()
            raise LaunchError(
                f"Driver and executors do not match: {reason}. Install the same versions on both."
            )
        returned = rows.ranks("result")
        missing = sorted(set(range(num_ranks)) - set(returned))
        if not missing:
            return [rows.load(rank) for rank in range(num_ranks)]
        failures = received + [
            Failure.from_json(rows.read("failure", rank), pickled=rows.read("error", rank))
            for rank in rows.ranks("failure")
        ]
        raise_for_failures(
            failures, stage.error, stage, limits, were_ranks_lost(failures, returned, num_ranks)
        )
        raise ExecutorsLostError(
            f"Ranks {missing} were lost with their executors. Look at the executors' logs, then run again."
        )
    except SparkdlError:
        raise
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc"):
            raise_for_failures(received, error, stage, limits, were_ranks_lost(received, (), num_ranks))
        raise


class _Rows:
    """The rows that the tasks yielded, by kind and rank."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._num_chunks = {(kind, rank): num_chunks for rank, kind, num_chunks in stage.outcomes()}

    def ranks(self, kind: str) -> list[int]:
        return sorted(rank for other, rank in self._num_chunks if other == kind)

    def read(self, kind: str, rank: int) -> bytes:
        with self._fetched(kind, rank) as file:
            return file.read()

    def load(self, rank: int) -> Any:
        with self._fetched("result", rank) as file:
            return pickle.load(file)  # noqa: S301 - came through Spark's own authenticated channels, or from our process

    @contextmanager
    def _fetched(self, kind: str, rank: int) -> Iterator[IO[bytes]]:
        with tempfile.SpooledTemporaryFile(max_size=RESULTS_BYTES) as file:
            self._stage.fetch(rank, kind, self._num_chunks.get((kind, rank), 0), file)
            file.seek(0)
            yield file
