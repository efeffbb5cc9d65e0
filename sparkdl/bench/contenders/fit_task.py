"""The task of every contender of ``sparkdl bench fit``: rows, model, optimizer, and the evaluation of the weights.

The frame is made on the *driver*; the model and the optimizer are made in every process that trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.bench.contenders.sessions import Trial
from sparkdl.spark.jobs import jobs_of, named_jobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt
    import torch
    from pyspark.sql import DataFrame, SparkSession

WIDTH = 28
FEATURES = [f"f{index}" for index in range(WIDTH)]
LABEL = "label"
PHASES = ("writing", "launching", "training", "returning")
_HIDDEN = 256
_LEARNING_RATE = 1e-3
_NOISE = 0.1
_JUDGED_ROWS = 8192
_NUM_BATCHES = 64

Weights = Mapping[str, "npt.NDArray[np.float32]"]
"""Weights of a trained model, by the names of the parameters of :func:`make_model`."""


@dataclass(frozen=True, kw_only=True)
class FitSize:
    """Settings of one fit.

    Attributes:
        num_rows: number of rows of the frame, which has one partition per rank.
        num_ranks: number of ranks, with one thread each.
        batch_size: number of rows per rank and step.
        epochs: number of epochs.
    """

    num_rows: int
    num_ranks: int = 2
    batch_size: int = 256
    epochs: int = 3

    @property
    def num_steps(self) -> int:
        """Number of steps of all epochs on a rank that drops no row."""
        return self.epochs * -(-self.num_rows // (self.num_ranks * self.batch_size))


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Times and result of a fit by one contender.

    All times are in seconds since 1970: the processes of a fit have that clock in common.

    Attributes:
        started: time at which fit was called.
        written: time at which the rows had been written to Parquet.
        training: time at which rank 0 asked for its first batch.
        trained: time at which rank 0 had done its last step.
        ended: time at which the driver had the model.
        weights: weights of the model.
        parts: seconds of the training by what ranks did, on average over the ranks; empty if that is not known.
    """

    started: float
    written: float
    training: float
    trained: float
    ended: float
    weights: Weights
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds from the call of fit to the trained model."""
        return self.ended - self.started

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase of :data:`PHASES`; the work that a contender does during the writing counts as writing."""
        times = (self.started, self.written, self.training, self.trained, self.ended)
        return {name: after - before for name, before, after in zip(PHASES, times, times[1:], strict=False)}


def make_frame(spark: SparkSession, size: FitSize) -> DataFrame:
    """Return a cached frame of random features, with a label that a model can learn from some of them."""
    from pyspark.sql import functions as F

    rows = spark.range(0, size.num_rows, 1, size.num_ranks).select(
        *[F.rand(seed=index).cast("float").alias(name) for index, name in enumerate(FEATURES)]
    )
    label = F.sin(F.lit(3.0) * (F.col("f0") + F.col("f1"))) + F.col("f2") * F.col("f3")
    frame = rows.select(*FEATURES, (label + _NOISE * F.randn(seed=WIDTH)).cast("float").alias(LABEL)).cache()
    with jobs_of("bench fit"), named_jobs(spark, "caching rows"):
        frame.count()
    return frame


def make_model() -> torch.nn.Module:
    """Make the network, with the initial weights that all contenders share."""
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
    """Make AdamW with the default settings of torch."""
    import torch

    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE)


def weights_of(model: torch.nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights as NumPy arrays, which any process can unpickle."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}


def judged_rows(frame: DataFrame) -> npt.NDArray[np.float32]:
    """Return rows of the frame to compare the models on: the features, and the label in the last column."""
    with jobs_of("bench fit"), named_jobs(frame.sparkSession, "fetching rows"):
        rows: list[Any] = frame.limit(_JUDGED_ROWS).collect()
    return np.array(rows, dtype=np.float32)


def loss_of(weights: Weights, rows: npt.NDArray[np.float32]) -> float:
    """Return the mean squared error of a model with these weights on the rows."""
    import torch

    model = make_model()
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
    with torch.no_grad():
        outputs = model(torch.from_numpy(rows[:, :WIDTH])).squeeze(1)
    return float(torch.nn.functional.mse_loss(outputs, torch.from_numpy(rows[:, WIDTH])))


class ArithmeticTrial(Trial):
    """The arithmetic of a fit alone, on one rank: forward, backward and optimizer, on batches in memory.

    It is the yardstick, not a contender: nothing is read and no gradient is reduced.

    Args:
        case: settings of the case: ``steps`` per operation, and ``batch_size``.
        seed: seed of the random rows.
    """

    def __init__(self, case: Mapping[str, Any], seed: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.model = make_model()
        self._optimizer = make_optimizer(self.model.parameters())
        self._steps = case["steps"]
        generator = torch.Generator().manual_seed(seed)
        shape = (_NUM_BATCHES, case["batch_size"], WIDTH + 1)
        self._batches = list(torch.rand(shape, generator=generator))
        self._loss = torch.zeros(())

    def run(self, operations: int) -> None:
        """Run the steps of this number of operations."""
        from torch.nn.functional import mse_loss

        for step in range(operations * self._steps):
            batch = self._batches[step % _NUM_BATCHES]
            self._optimizer.zero_grad()
            outputs = self.model(batch[:, :WIDTH]).squeeze(1)
            self._loss = mse_loss(outputs, batch[:, WIDTH])
            self._loss.backward()
            self._optimizer.step()

    def check(self) -> None:
        """Raise an ``AssertionError`` if the loss is not finite."""
        assert math.isfinite(float(self._loss.detach())), "the weights are no longer numbers"
