"""The specification of a fit, which the driver sends to the ranks.

It holds everything that a fit is made of, and nothing of Spark. It includes the metric that decides how good the
model is after an epoch, and whether it is minimized or maximized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from sparkdl.data.dataset.rows import RowChoice
    from sparkdl.model.heads import Head
    from sparkdl.model.inputs import ModelInputs
    from sparkdl.parallel import Parallelism
    from sparkdl.training.callbacks import Callback, Patience
    from sparkdl.training.history import EpochRecord
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.metrics import Metric
    from sparkdl.training.objective import UserStep


OptimizerFactory: TypeAlias = Callable[[Iterator[nn.Parameter]], Optimizer]

AugmentFunction: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Where and when checkpoints are taken; a part of the spec.

    Attributes:
        url: of the folder.
        every_updates: updates of the weights between two of them; None for one at the end of each epoch alone.
        num_kept: how many of the last ones stay.
        num_ranks: for how many ranks the rows are planned while there is no checkpoint, as after a restart on fewer;
            None for as many as there are.
    """

    url: str
    every_updates: int | None = None
    num_kept: int = 2
    num_ranks: int | None = None


FREE = {"identity": "free"}
"""Metadata of fields that may differ when a fit resumes."""

DESCRIBED = {"identity": "described"}
"""Metadata of fields that hold objects; the identity of a fit compares descriptions of them."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One fit, as every rank receives it: built on the *driver*, pickled, read on the *ranks*."""

    model: nn.Module = field(metadata=DESCRIBED)
    """The module to train; its weights are the initial weights, unless there are others. Each rank trains a copy."""

    initial_weights: str | None = field(default=None, metadata=FREE)
    """:data:`DRAWN` for weights drawn by the seed, or the folder that they come from; None for the module's own."""

    inputs: ModelInputs = field(metadata=DESCRIBED)
    """The feature columns, and how the model is called with them."""

    heads: tuple[Head, ...] = field(metadata=DESCRIBED)
    """The label columns and their losses; training minimizes the weighted sum of the losses."""

    user_step: UserStep | None = field(default=None, metadata=DESCRIBED)
    """Called instead of model and losses; see :mod:`sparkdl.training.objective`."""

    augment: AugmentFunction | None = field(default=None, metadata=DESCRIBED)
    """Called with the prepared arrays of a batch before the model is trained on it; returns others by these names."""

    optimizer: OptimizerFactory = field(metadata=DESCRIBED)
    """Called with ``model.parameters()``: on each rank for the training, and where a fit is tried or identified."""

    scheduler: SchedulerFactory | None = field(default=None, metadata=DESCRIBED)
    """Called with the optimizer and the number of steps of the schedule, wherever the optimizer was made; or None."""

    scheduler_interval: str = "epoch"
    """``"epoch"`` or ``"step"``: when the scheduler is stepped, a step being an update of the weights."""

    learning_rate_scaling: str = "none"
    """``"none"``, ``"linear"`` or ``"sqrt"``; see :func:`sparkdl.training.learning_rate.scaling_factor`."""

    warmup_steps: int = 0
    """Updates over which the learning rate grows to its full value."""

    accumulated_batches: int = field(default=1, metadata={"param": "gradientAccumulationSteps"})
    """Batches of each rank that lead to one update of the weights."""

    max_grad_norm: float | None = None
    """To which the norm of all gradients is clipped in each update; None for no clipping."""

    precision: str = "float32"
    """``"float32"``, or the lower precision in which the model computes: ``"bfloat16"`` or ``"float16"``."""

    weight: str | None = field(default=None, metadata={"param": "weightCol"})
    """Name of a column of non-negative row weights; the loss is then the weighted mean."""

    batch_size: int
    """Rows per rank and step."""

    epochs: int = field(metadata=FREE)
    """How often every row is visited."""

    seed: int
    """Seed of the order of the rows and, together with the rank, of every random number drawn in training."""

    shuffle: bool = True
    """Whether each epoch has its own order of rows."""

    cache: str | None = field(default=None, metadata=FREE)
    """``"memory"`` or ``"disk"``: where ranks keep decoded rows after the first epoch, as the feed does."""

    training_rows: RowChoice | None = field(default=None, metadata=DESCRIBED)
    """Which rows the module is trained on, their numbers known; None for all of them."""

    validation_rows: RowChoice | None = field(default=None, metadata=FREE)
    """On which rows loss and metrics are found after each epoch, their numbers known; None for no validation."""

    sync_batch_norm: bool = False
    """Whether BatchNorms take the statistics of all ranks' rows."""

    compile: bool = field(default=False, metadata=FREE)
    """Whether the module is compiled by :func:`torch.compile` on each rank."""

    deterministic: bool = False
    """Whether torch refuses operations that do not repeat to the bit."""

    metrics: Mapping[str, Metric] = field(default_factory=dict, metadata=DESCRIBED)
    """By name what is found beside the loss, of training and validation rows; see :mod:`sparkdl.training.metrics`."""

    best: Goal | None = field(default=None, metadata=DESCRIBED)
    """Which epoch's weights the fit returns; None for the last one's."""

    patience: Patience | None = field(default=None, metadata=DESCRIBED)
    """When to stop early; None for never."""

    watched: Goal | None = field(default=None, metadata=DESCRIBED)
    """What has to improve for the fit to continue."""

    callbacks: tuple[Callback, ...] = field(default=(), metadata=FREE)
    """Run on every rank; see :mod:`sparkdl.training.callbacks`."""

    device: str = field(default="cpu", metadata=FREE)
    """``"cpu"`` or ``"cuda"``. There is no fallback from one to the other."""

    num_threads: int | None = field(default=None, metadata=FREE)
    """torch threads per rank; None shares the host's cores among its ranks."""

    num_reader_threads: int = field(default=2, metadata=FREE)
    """Threads that read Parquet ahead of the training."""

    has_unused_parameters: bool = field(default=False, metadata=FREE)
    """Whether some parameters may have no part in the loss; DDP then looks for them in each step.

    They may with a step of the user's own, whose way may depend on the rows, and where some had none when the driver
    tried it.
    """

    parallelism: Parallelism | None = field(default=None, metadata=FREE)
    """How the ranks share the module; None for a replica on each."""

    checkpoints: CheckpointPlan | None = field(default=None, metadata=FREE)
    """Where and when checkpoints are taken, and from where the fit resumes; None for no checkpoints."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the label columns."""
        return tuple(head.label.name for head in self.heads)

    @property
    def losses(self) -> nn.ModuleList:
        """Those losses that are modules."""
        return nn.ModuleList(head.loss for head in self.heads if isinstance(head.loss, nn.Module))

    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that a batch must hold."""
        weight = () if self.weight is None else (self.weight,)
        return tuple(dict.fromkeys((*self.inputs.names, *self.label_names, *weight)))


DRAWN = "drawn"
"""Stands for initial weights that the seed determines."""

MODES = ("min", "max")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A metric to minimize or maximize.

    Attributes:
        metric: ``"loss"``, ``"val_loss"``, or the name of a metric, with ``val_`` before it on validation rows.
        mode: ``"min"`` or ``"max"``.
    """

    metric: str
    mode: str = "min"

    def value(self, record: EpochRecord) -> float:
        """Return the number of an epoch."""
        return record.value(self.metric)

    def is_better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """Whether a value is better by more than some amount. Any number is better than None, NaN never is."""
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - by if self.mode == "min" else value > than + by
