"""What every contender of ``sparkdl bench fit`` trains: rows, model, optimizer, and how its weights are judged.

The frame is made on the *driver*; the model and the optimizer are made by every process that trains.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.data.spark.jobs import jobs_of, named_jobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt
    import torch
    from pyspark.sql import DataFrame, SparkSession

WIDTH = 28
LABEL = "label"
PHASES = ("writing", "launching", "training", "returning")
_HIDDEN = 256
_LEARNING_RATE = 1e-3
_NOISE = 0.1
_JUDGED_ROWS = 8192

Weights = Mapping[str, "npt.NDArray[np.float32]"]
"""A trained model's, by the names of :func:`make_model`'s."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One fit.

    Attributes:
        num_rows: of the frame, which has as many partitions as there are ranks.
        num_ranks: with one thread each.
        batch_size: rows of a rank in a step.
        epochs: how often every row is visited.
    """

    num_rows: int
    num_ranks: int = 2
    batch_size: int = 256
    epochs: int = 3

    @property
    def num_steps(self) -> int:
        """Steps of all epochs, of a rank that drops no row."""
        return self.epochs * -(-self.num_rows // (self.num_ranks * self.batch_size))


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a contender did.

    Attributes:
        started: when, as all times in seconds since the epoch: the processes of a fit have that clock in common.
        written: when the rows lay in Parquet.
        training: when the first rank asked for its first batch.
        trained: when the last step was done.
        ended: when the driver had the model.
        weights: of the model.
    """

    started: float
    written: float
    training: float
    trained: float
    ended: float
    weights: Weights

    @property
    def seconds(self) -> float:
        """From the call to the trained model."""
        return self.ended - self.started

    @property
    def phases(self) -> dict[str, float]:
        """The seconds by :data:`PHASES`; what a contender does while its rows are written counts as writing."""
        times = (self.started, self.written, self.training, self.trained, self.ended)
        return {name: after - before for name, before, after in zip(PHASES, times, times[1:], strict=False)}


def column_names() -> list[str]:
    """The columns of features."""
    return [f"f{index}" for index in range(WIDTH)]


def make_frame(spark: SparkSession, job: Job) -> DataFrame:
    """Cache random features, and a label that a model can learn from some of them."""
    from pyspark.sql import functions as F

    names = column_names()
    rows = spark.range(0, job.num_rows, 1, job.num_ranks).select(
        *[F.rand(seed=index).cast("float").alias(name) for index, name in enumerate(names)]
    )
    label = F.sin(F.lit(3.0) * (F.col("f0") + F.col("f1"))) + F.col("f2") * F.col("f3")
    frame = rows.select(*names, (label + _NOISE * F.randn(seed=WIDTH)).cast("float").alias(LABEL)).cache()
    with jobs_of("bench fit"), named_jobs(spark, "caching rows"):
        frame.count()
    return frame


def make_model() -> torch.nn.Module:
    """The network, with the weights that every contender begins with."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, _HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(_HIDDEN, _HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(_HIDDEN, 1),
    )


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, as torch has it by default."""
    import torch

    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE)


def weights_of(model: torch.nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Weights in a form that any process can unpickle."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}


def judged_rows(frame: DataFrame) -> npt.NDArray[np.float32]:
    """Some rows of the frame, on which the models are compared: features, and the label in the last column."""
    with jobs_of("bench fit"), named_jobs(frame.sparkSession, "fetching rows"):
        rows: list[Any] = frame.limit(_JUDGED_ROWS).collect()
    return np.array(rows, dtype=np.float32)


def loss_of(weights: Weights, rows: npt.NDArray[np.float32]) -> float:
    """The mean squared error of a model."""
    import torch

    model = make_model()
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
    with torch.no_grad():
        outputs = model(torch.from_numpy(rows[:, :WIDTH])).squeeze(1)
    return float(torch.nn.functional.mse_loss(outputs, torch.from_numpy(rows[:, WIDTH])))


def now() -> float:
    """The time on the clock that the processes of a fit have in common."""
    return time.time()
