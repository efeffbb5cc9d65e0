"""The specification of a fit, which the driver sends to the ranks.

It holds all settings of a fit, and nothing of Spark. They include the metric that ranks epochs, and whether
it is minimized or maximized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    import torch

    from sparkdl.data.dataset.row_choice import RowChoice
    from sparkdl.model.heads import Head
    from sparkdl.model.inputs import ModelInputs
    from sparkdl.parallel import Parallelism
    from sparkdl.slow_links import Compression, Synchronization
    from sparkdl.training.callbacks import Callback, Patience
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.metrics import Metric
    from sparkdl.training.objective import UserStep


OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]


AugmentFunction: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Where and when checkpoints are taken; a part of the spec.

    Attributes:
        url: URL of the folder of the checkpoints.
        every_updates: number of updates of the weights between two checkpoints; None for checkpoints at the end of
            each epoch only.
        num_kept: number of the newest checkpoints to keep.
        num_ranks: number of ranks for which the rows are planned if there is no checkpoint yet, such as after a restart
            on fewer ranks; None for the actual number of ranks.
        lease: name of the driver's lease on the folder, which the ranks check before they write; each start of the
            ranks has another lease. Empty for none.
    """

    url: str
    every_updates: int | None = None
    num_kept: int = 2
    num_ranks: int | None = None
    lease: str = ""


FREE = {"identity": "free"}
"""Metadata of fields that may differ when a fit resumes."""

DESCRIBED = {"identity": "described"}
"""Metadata of fields that hold objects; the identity of a fit compares their descriptions."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One fit, as every rank receives it: built on the *driver*, pickled, read on the *ranks*."""

    model: nn.Module = field(metadata=DESCRIBED)
    """The module to train, with its initial weights unless ``initial_weights`` is set. Each rank trains a copy."""

    initial_weights: str | None = field(default=None, metadata=FREE)
    """:data:`DRAWN` for weights drawn with the seed, or the folder to load them from; None for the module's own."""

    initial_files: Mapping[str, str] | None = field(default=None, metadata=FREE)
    """Content of the files that the initial weights are read from, on the driver or on the ranks, by their names; see
    :func:`sparkdl.training.checkpoint.identity.model_files_identity`. Set for fits with checkpoints, which compare it;
    None if the weights are from no file."""

    inputs: ModelInputs = field(metadata=DESCRIBED)
    """Feature columns, and how the model is called with them."""

    heads: tuple[Head, ...] = field(metadata=DESCRIBED)
    """Label columns and their losses; training minimizes the weighted sum of the losses."""

    user_step: UserStep | None = field(default=None, metadata=DESCRIBED)
    """The user's training step, called in place of model and losses; see :mod:`sparkdl.training.objective`."""

    augment: AugmentFunction | None = field(default=None, metadata=DESCRIBED)
    """Function applied to the prepared arrays of each training batch; returns changed arrays by the same names."""

    optimizer: OptimizerFactory = field(metadata=DESCRIBED)
    """Makes the optimizer from ``model.parameters()``; also called for the trial and for the identity of the fit."""

    scheduler: SchedulerFactory | None = field(default=None, metadata=DESCRIBED)
    """Makes the scheduler from the optimizer and the number of its steps; None for a constant learning rate."""

    scheduler_interval: str = "epoch"
    """Interval at which the scheduler is stepped: ``"epoch"``, or ``"step"`` for each update of the weights."""

    learning_rate_scaling: str = "none"
    """``"none"``, ``"linear"`` or ``"sqrt"``; see :func:`sparkdl.training.learning_rate.scaling_factor`."""

    warmup_steps: int = 0
    """Number of updates over which the learning rate grows to its full value."""

    accumulated_batches: int = field(default=1, metadata={"param": "gradientAccumulationSteps"})
    """Number of batches per rank whose gradients are accumulated for one update of the weights."""

    max_grad_norm: float | None = None
    """Maximum joint norm of all gradients, to which they are clipped in each update; None for no clipping."""

    precision: str = "float32"
    """``"float32"``, or the lower precision in computations: ``"bfloat16"``, ``"float16"`` or ``"float8"``."""

    weight: str | None = field(default=None, metadata={"param": "weightCol"})
    """Name of a column of non-negative row weights; the loss is then the weighted mean."""

    batch_size: int
    """Number of rows per rank and step."""

    balance: str = field(default="equal", metadata=FREE)
    """How the rows of a step are divided among ranks: ``"equal"``, or by their measured ``"speed"``."""

    straggler_factor: float | None = field(default=None, metadata=FREE)
    """A rank is slow if its time per row is at least this factor times the median of the others; None for no watch."""

    straggler_seconds: float = field(default=30.0, metadata=FREE)
    """Seconds that a rank has to be slow before it is named."""

    replaces_stragglers: bool = field(default=False, metadata=FREE)
    """Whether a slow rank leaves an elastic launch, so that another one takes its place."""

    epochs: int = field(metadata=FREE)
    """Total number of epochs of the fit."""

    seed: int
    """Seed of the order of the rows and, together with the rank, of every random number drawn in training."""

    shuffle: bool = True
    """Whether the rows are shuffled in each epoch."""

    cache: str | None = field(default=None, metadata=FREE)
    """``"memory"`` or ``"disk"``: where the feed of each rank keeps decoded rows after the first epoch; None for no
    cache."""

    training_rows: RowChoice | None = field(default=None, metadata=DESCRIBED)
    """Rows to train on, with row counts already known; None for all rows."""

    validation_rows: RowChoice | None = field(default=None, metadata=FREE)
    """Rows on which loss and metrics are computed after each epoch, with row counts already known; None for no
    validation."""

    sync_batch_norm: bool = False
    """Whether BatchNorm layers use statistics over the rows of all ranks."""

    compare_replicas: bool = field(default=True, metadata=FREE)
    """Whether the ranks compare their weights at the end of the first step and of each epoch, and at checkpoints."""

    compile: bool = field(default=False, metadata=FREE)
    """Whether the module is compiled by :func:`torch.compile` on each rank."""

    deterministic: bool = False
    """Whether torch refuses operations whose results can differ from run to run."""

    metrics: Mapping[str, Metric] = field(default_factory=dict, metadata=DESCRIBED)
    """Metrics by name, computed on training and validation rows; see :mod:`sparkdl.training.metrics`."""

    best: Goal | None = field(default=None, metadata=DESCRIBED)
    """Metric that selects the epoch whose weights the fit returns; None for the weights of the last epoch."""

    patience: Patience | None = field(default=None, metadata=DESCRIBED)
    """When to stop early; None for no early stopping."""

    watched: Goal | None = field(default=None, metadata=DESCRIBED)
    """Metric that has to improve: for the fit to continue if ``patience`` is set, and for a ReduceLROnPlateau; None for
    the loss."""

    callbacks: tuple[Callback, ...] = field(default=(), metadata=FREE)
    """Callbacks, called on every rank; see :mod:`sparkdl.training.callbacks`."""

    device: str = field(default="cpu", metadata=FREE)
    """``"cpu"`` or ``"cuda"``. There is no fallback from one to the other."""

    num_reader_threads: int = field(default=2, metadata=FREE)
    """Number of threads per rank that read Parquet ahead of the training."""

    has_unused_parameters: bool = field(default=False, metadata=FREE)
    """Whether some parameters may have no part in the loss; DDP then looks for them in each step.

    It is set for a user's training step, whose control flow may depend on the rows, and if some parameters got no
    gradient when the driver tried the model.
    """

    parallelism: Parallelism | None = field(default=None, metadata=FREE)
    """How the module is divided among ranks; None for a replica on each rank."""

    planner: Callable[[nn.Module, torch.device], tuple[Parallelism, Mapping[str, str]]] | None = field(
        default=None, metadata=FREE
    )
    """Chooses ``parallelism`` on the ranks, which know the cluster, and says why. Collective; needs torch.distributed.
    None to take it as it is. A step then has ``batch_size`` rows for each rank, in every layout."""

    synchronization: Synchronization | None = field(default=None, metadata=DESCRIBED)
    """When ranks synchronize weights that each of them updates by itself; None for averaged gradients in each step."""

    compression: Compression | None = field(default=None, metadata=DESCRIBED)
    """How gradients are compressed for slow links; None to average them as they are."""

    is_range_test: bool = field(default=False, metadata=FREE)
    """Whether the fit records the loss by learning rate, and ends when it explodes, without an error."""

    checkpoints: CheckpointPlan | None = field(default=None, metadata=FREE)
    """Where and when checkpoints are taken, and the folder from which the fit resumes; None for no checkpoints."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the label columns."""
        return tuple(head.label.name for head in self.heads)

    @property
    def losses(self) -> nn.ModuleList:
        """The losses that are modules."""
        return nn.ModuleList(head.loss for head in self.heads if isinstance(head.loss, nn.Module))

    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that a batch must hold."""
        weight = () if self.weight is None else (self.weight,)
        return tuple(dict.fromkeys((*self.inputs.names, *self.label_names, *weight)))


DRAWN = "drawn"
"""Value of ``initial_weights`` for weights that are drawn with the seed."""

MODES = ("min", "max")

BALANCES = ("equal", "speed")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A metric to minimize or maximize.

    Attributes:
        metric: ``"loss"``, ``"val_loss"``, or the name of a metric, with ``val_`` before it on validation rows.
        mode: ``"min"`` or ``"max"``.
    """

    metric: str
    mode: str = "min"

    def is_better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """Whether a value is better than another one by more than ``by``.

        Any number is better than None; NaN is never better.
        """
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - by if self.mode == "min" else value > than + by
