"""What a job will do: rows, shards, steps, memory, ranks per host. Runs on the *driver*; ranks start, and do not train.

``--dry-run`` counts the rows and starts all ranks once, so that what it says of hosts was seen, not computed.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.data.dataset.shards import rows_per_rank, steps_per_epoch
from sparkdl.data.feed.feed import READ_AHEAD_BYTES
from sparkdl.data.spark.jobs import jobs_of
from sparkdl.estimators.validation_split import validation_column
from sparkdl.jobs.rows import RowCounts, count_rows
from sparkdl.launch import run_on_ranks
from sparkdl.training.update import updates_per_epoch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdl.jobs.model_size import ModelSize
    from sparkdl.launch import RankContext


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host on which ranks were started.

    Attributes:
        name: that it calls itself by.
        ranks: their numbers.
        available_bytes: memory that was free there while they ran; None where Linux does not tell.
        num_cores: that each of them may use.
    """

    name: str
    ranks: tuple[int, ...]
    available_bytes: int | None
    num_cores: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a job will do.

    Attributes:
        rows: counts of the rows.
        num_training: rows that are trained on.
        is_exact: whether that is certain; rows that are drawn by lot come out a little more or fewer.
        shards: rows of each rank.
        steps: of an epoch.
        updates: of the weights, in an epoch.
        epochs: of the fit.
        batch_size: rows of a rank in a step.
        model: what the model takes on each rank; None for one that is made of the rows.
        hosts: on which the ranks were started.
    """

    rows: RowCounts
    num_training: int
    is_exact: bool
    shards: tuple[int, ...]
    steps: int
    updates: int
    epochs: int
    batch_size: int
    model: ModelSize | None
    hosts: tuple[Host, ...]

    @property
    def rows_bytes(self) -> int:
        """What all rows take, decoded."""
        return round(self.rows.num_rows * self.rows.bytes_per_row)

    @property
    def read_ahead_bytes(self) -> int:
        """What a rank holds of them at most: each row group counts twice while it is decoded."""
        return min(2 * self.rows_bytes, READ_AHEAD_BYTES)

    @property
    def rank_bytes(self) -> int:
        """What a rank takes, as far as that is known before it trains."""
        return self.read_ahead_bytes + (self.model.total if self.model else 0)


def make_plan(estimator: Any, frame: DataFrame, columns: list[str], model: ModelSize | None) -> Plan:
    """Return the plan of a fit.

    Args:
        estimator: with checked Params.
        frame: the rows.
        columns: that the fit reads.
        model: what the model takes on each rank, where there is one already.

    Raises:
        DataError: if the rows cannot be used.
        ShardingError: if there are fewer of them than ranks.
        LaunchError: if the ranks cannot be started.
    """
    params = estimator.params_of_fit()
    fraction = params.getValidationFraction()
    rows = count_rows(frame, columns, validation_column(params))
    left_out = rows.num_marked or round(rows.num_rows * (fraction or 0.0))
    num_training, num_ranks = rows.num_rows - left_out, params.getNumWorkers()
    steps = steps_per_epoch(num_training, num_ranks, params.getBatchSize())
    return Plan(
        rows=rows,
        num_training=num_training,
        is_exact=fraction is None,
        shards=tuple(rows_per_rank(num_training, num_ranks)),
        steps=steps,
        updates=updates_per_epoch(steps, params.getGradientAccumulationSteps()),
        epochs=params.getEpochs(),
        batch_size=params.getBatchSize(),
        model=model,
        hosts=_start_ranks(params, frame),
    )


def _start_ranks(params: Any, frame: DataFrame) -> tuple[Host, ...]:
    with jobs_of("looking at hosts"):
        told = run_on_ranks(
            _describe_place,
            num_ranks=params.getNumWorkers(),
            spark=frame.sparkSession,
            transport=params.getTransport(),
            wire=params.getWire(),
            gpus_per_rank=params.getGpusPerWorker(),
        )
    hosts = []
    for index in sorted({place["host"] for place in told}):
        ranks = tuple(rank for rank, place in enumerate(told) if place["host"] == index)
        first = told[ranks[0]]
        known = [told[rank]["available_bytes"] for rank in ranks if told[rank]["available_bytes"] is not None]
        hosts.append(
            Host(
                name=first["name"],
                ranks=ranks,
                available_bytes=min(known) if known else None,
                num_cores=first["num_cores"],
            )
        )
    return tuple(hosts)


def _describe_place(context: RankContext) -> dict[str, Any]:
    """What a rank sees of its host; runs on a rank."""
    return {
        "host": context.topology.host,
        "name": socket.gethostname(),
        "available_bytes": _available_bytes(),
        "num_cores": len(os.sched_getaffinity(0)),
    }


def _available_bytes() -> int | None:
    """Memory that is free for programs, also within the limit of a container."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass  # no such file outside of a container with limits, or before cgroup v2
    return min(found) if found else None
