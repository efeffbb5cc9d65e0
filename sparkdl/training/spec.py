"""What crosses from the driver to the ranks: everything a fit is made of, and nothing of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from sparkdl.data.row_filter import RowChoice
    from sparkdl.training.callbacks import Callback
    from sparkdl.training.early_stopping import Patience
    from sparkdl.training.goal import Goal
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.losses import LossFunction
    from sparkdl.training.metrics import Metric

OptimizerFactory: TypeAlias = Callable[[Iterator[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Where and when checkpoints are taken; a part of the spec.

    Attributes:
        url: of the folder.
        every_updates: updates of the weights between two of them; None for one at the end of each epoch alone.
        num_kept: how many of the last ones stay.
    """

    url: str
    every_updates: int | None = None
    num_kept: int = 2


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One fit, as every rank receives it: built on the *driver*, pickled, read on the *ranks*."""

    model: nn.Module
    """The module to train; its weights are the initial weights. Each rank trains a copy."""

    loss: LossFunction
    """Called with ``(outputs, targets)``; see :mod:`sparkdl.training.losses`."""

    optimizer: OptimizerFactory
    """Called once on each rank with ``model.parameters()``."""

    scheduler: SchedulerFactory | None = None
    """Called once on each rank with the optimizer and the number of steps of the schedule; None for none."""

    scheduler_interval: str = "epoch"
    """``"epoch"`` or ``"step"``: when the schedule goes on, a step being an update of the weights."""

    learning_rate_scaling: str = "none"
    """``"none"``, ``"linear"`` or ``"sqrt"``; see :func:`sparkdl.training.learning_rate.scaling_factor`."""

    warmup_steps: int = 0
    """Updates over which the learning rate grows to its full value."""

    accumulated_batches: int = 1
    """Batches of each rank that lead to one update of the weights."""

    max_grad_norm: float | None = None
    """To which the norm of all gradients is clipped in each update; None for no clipping."""

    precision: str = "float32"
    """``"float32"``, or the lower precision in which the model computes: ``"bfloat16"`` or ``"float16"``."""

    features: str
    """Name of the feature column, ``(rows, *shape)`` in each batch."""

    label: str
    """Name of the label column."""

    weight: str | None = None
    """Name of a column of non-negative row weights; the loss is then the weighted mean."""

    features_dtype: str = "float32"
    """torch dtype in which the features enter the model; found by :func:`sparkdl.training.probe.probe`."""

    label_dtype: str = "float32"
    """torch dtype in which the labels enter the loss."""

    label_shape: tuple[int, ...] = ()
    """Shape of one row's label."""

    batch_size: int
    """Rows per rank and step."""

    epochs: int
    """How often every row is visited."""

    seed: int
    """Seed of the order of the rows and, together with the rank, of every random number drawn in training."""

    shuffle: bool = True
    """Whether each epoch has its own order of rows."""

    cache: str | None = None
    """``"memory"`` or ``"disk"``: where ranks keep decoded rows after the first epoch, as the feed does."""

    training_rows: RowChoice | None = None
    """Which rows the module is trained on, their numbers known; None for all of them."""

    validation_rows: RowChoice | None = None
    """On which rows loss and metrics are found after each epoch, their numbers known; None for no validation."""

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """By name what is found beside the loss, of training and validation rows; see :mod:`sparkdl.training.metrics`."""

    best: Goal | None = None
    """Which epoch's weights the fit returns; None for the last one's."""

    patience: Patience | None = None
    """When to stop early; None for never."""

    watched: Goal | None = None
    """What has to get better so that the fit goes on."""

    callbacks: tuple[Callback, ...] = ()
    """Run on every rank; see :mod:`sparkdl.training.callbacks`."""

    device: str = "cpu"
    """``"cpu"`` or ``"cuda"``. There is no fallback from one to the other."""

    num_threads: int | None = None
    """torch threads per rank; None shares the host's cores among its ranks."""

    num_reader_threads: int = 2
    """Threads that read Parquet ahead of the training."""

    has_unused_parameters: bool = False
    """Whether some parameters had no part in the loss when the driver tried it; DDP then looks for them."""

    checkpoints: CheckpointPlan | None = None
    """Where and when checkpoints are taken, and where the fit goes on from; None for no checkpoints."""

    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that a batch must hold."""
        return tuple(name for name in (self.features, self.label, self.weight) if name is not None)
