"""One training step on one rank: forward, exactly scaled backward, update.

The first loss that is not finite is detected without making a GPU wait in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import TrainingError
from sparkdl.model.losses import LossTerm
from sparkdl.torch import CrossRankBatchNorm
from sparkdl.training.checkpoint.state import buffers_kept
from sparkdl.training.objective import Batch, Objective

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sparkdl.collective import Communicator
    from sparkdl.training.distribution import ModelDistribution
    from sparkdl.training.metrics import EpochMetrics
    from sparkdl.training.precision import Precision
    from sparkdl.training.update import UpdatePlan, WeightUpdate


_NEVER = np.iinfo(np.int64).max
_COMPARE_EVERY_STEPS = 50


class FiniteLossCheck:
    """Raises an error if a loss is NaN or infinite.

    On CPU, the rank with the loss raises at once: before its backward pass or, with a pipeline, after it. The other
    ranks cannot finish the update without its gradients. If several losses of one update are not finite, the error may
    name any of them. On CUDA, losses are recorded on the device. All ranks compare the records every 50 steps, at the
    end of an epoch and before a checkpoint, and the error names the earliest step of all ranks.

    Attributes:
        raises: whether such a loss is an error; in a range test of learning rates it is none.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self.raises = True
        self._is_deferred = device.type != "cpu"
        self._first_bad_step = torch.full((), _NEVER, dtype=torch.int64, device=device)

    def observe(self, loss_mean: Tensor, batch: Batch, *, epoch: int, step: int) -> None:
        """Check this rank's loss of one step; an error says which columns of the batch are not finite, if any.

        Raises:
            TrainingError: on CPU, if the loss is not finite.
        """
        if not self.raises:
            return
        if self._is_deferred:
            bad = torch.where(torch.isfinite(loss_mean.detach()), _NEVER, step)
            self._first_bad_step = torch.minimum(self._first_bad_step, bad)
            return
        value = float(loss_mean.detach())
        if not math.isfinite(value):
            raise _not_finite(
                str(value), epoch, step, f" on rank {self._communicator.rank}", _bad_columns(batch)
            )

    def compare_records(self, *, epoch: int, step: int, steps: int) -> None:
        """Compare the records after every 50th and the last step of an epoch. Collective on CUDA; nothing on CPU.

        Raises:
            TrainingError: on every rank, naming the earliest step in which some rank's loss was not finite.
        """
        if not self._is_deferred or (step % _COMPARE_EVERY_STEPS and step != steps):
            return
        first = np.array([int(self._first_bad_step)], dtype=np.int64)
        if self._communicator.world_size > 1:
            self._communicator.allreduce(first, op="min")
        if first[0] != _NEVER:
            raise _not_finite("NaN or infinite", epoch, int(first[0]), "")


def _not_finite(value: str, epoch: int, step: int, where: str, bad_columns: str = "") -> TrainingError:
    what_to_do = (
        f"In its batch {bad_columns}. Fill those values, or leave the rows out."
        if bad_columns
        else "Lower the learning rate, or look for NaN and extreme values in the data."
    )
    position = f"epoch {epoch}, step {step}"
    return TrainingError(f"The loss became {value} in {position}{where}. {what_to_do}").at(position)


def _bad_columns(batch: Batch) -> str:
    """Return a text that names the columns with NaN or infinity, and the number of such rows; empty without any."""
    causes = []
    for name, values in batch.items():
        if not (values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"):
            continue  # strings, which a trainStep may be given, and integers, which are always finite
        is_bad = ~torch.isfinite(torch.as_tensor(values))
        count = int(is_bad.reshape(len(values), -1).any(dim=1).sum())
        if count:
            causes.append(f"{name!r} is NaN or infinite in {count} of {len(values)} rows")
    return " and ".join(causes)


class TrainingStep:
    """Applies batches to a module so that N ranks compute what one rank would on the joined batch.

    An update of the weights takes the batches of one step, or of several steps where gradients are accumulated. The
    wrapped module averages the gradients of the ranks. Let ``w`` be the weight of this rank's rows in a batch (their
    number, unless rows or classes are weighted), ``W`` the weight of all ranks' rows in the update, and ``P`` the
    number of readers (see :mod:`sparkdl.training.distribution`). The rank's mean loss is scaled by ``w * P / W``
    before the backward pass, a loss that is a sum by ``w * P``. If ``W`` depends on batch contents, it is predicted
    from the last update, and the gradients are corrected after the last batch of the update. The gradients of a loss
    that is a sum are corrected there too, because in float16 a gradient must not grow with the number of rows.

    Attributes:
        finite: checks that losses are finite.
        last_batch: the last batch with rows, for steps without rows. It has to be set if the first step has none.
        on_loss: function that is called when the loss of a batch is computed, before the backward pass; with a
            pipeline, after it.

    A local update takes the same scaled gradients of this rank alone, so that the average of the ranks' updates by
    plain SGD is the update by averaged gradients. If ``W`` depends on batch contents, it is ``P * w``.
    """

    def __init__(
        self,
        *,
        distribution: ModelDistribution,
        objective: Objective,
        plan: UpdatePlan,
        update: WeightUpdate,
        precision: Precision,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self._distribution = distribution
        self.objective = objective
        self._plan = plan
        self._update = update
        self._precision = precision
        self._communicator = communicator
        self.device = device
        self.finite = FiniteLossCheck(communicator, device)
        self._weight_of_update = 0.0
        self._weight_per_row = 1.0
        """Predicted weight per row; the same on every rank."""
        self._next_weight_per_row = 1.0
        self.last_batch: Batch | None = None
        self.on_loss: Callable[[], None] = lambda: None

    def run(self, batch: Batch, *, epoch: int, step: int, metrics: EpochMetrics) -> tuple[Tensor, float, int]:
        """Compute the gradients of one step together with all other ranks.

        After the last step of an update, :meth:`update` applies them; it needs no other rank.

        Args:
            batch: this rank's columns; may hold 0 rows while other ranks have some.
            epoch: number of the epoch, from 1, for error messages.
            step: number of the step, from 1.
            metrics: metrics to update with outputs and labels of the batch.

        Returns:
            The detached mean loss of this rank's rows, its weight, and the number of rows.

        Raises:
            TrainingError: if the loss is not finite; see :class:`~sparkdl.training.step.FiniteLossCheck`.
        """
        rows = self.objective.num_rows(batch)
        updates = self._plan.is_last_of_update(step)
        self._distribution.take_up_changes()
        with nullcontext() if updates else self._distribution.without_averaging():
            if rows:
                self.last_batch = batch
                evaluation = self._distribution.forward_backward(
                    self.objective,
                    batch,
                    scaled=partial(self._scale, rows_of_update=self._plan.rows_of_update(step)),
                    check=partial(self._observe, batch=batch, epoch=epoch, step=step),
                )
                term = evaluation.term
                weight = term.weight if self._distribution.counts_rows else 0.0
                if term.weight and self._distribution.counts_outputs:
                    metrics.add(evaluation, rows)
            else:
                term, weight = self._pass_without_rows(), 0.0
        self._weight_of_update += weight
        if updates:
            divisor = self._divisor(self._plan.rows_of_update(step))
            # Whether rows count in a local update: of this rank, or of the ranks that average gradients with it.
            has_weight = self._distribution.num_averaged > 1 or self._weight_of_update > 0
            if self._distribution.is_local and not (divisor and has_weight):
                self._update.clear_gradients()
                divisor = 1.0  # the schedule goes on as that of other ranks, which have rows
            self._update.prepare(divisor)
            self._weight_of_update = 0.0
        self.finite.compare_records(epoch=epoch, step=step, steps=self._plan.num_steps)
        return term.mean.detach(), weight, rows if self._distribution.counts_rows else 0

    def update(self) -> None:
        """Update the weights of this rank by the gradients. No communication."""
        self._update.apply()
        self._weight_per_row = self._next_weight_per_row

    def state_dict(self) -> dict[str, float]:
        """Return the state that an update leaves for the next one; valid only between two updates."""
        return {"weight_per_row": self._weight_per_row}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._weight_per_row = self._next_weight_per_row = state["weight_per_row"]

    def _observe(self, loss_mean: Tensor, *, batch: Batch, epoch: int, step: int) -> None:
        self.on_loss()
        self.finite.observe(loss_mean, batch, epoch=epoch, step=step)

    def _scale(self, term: LossTerm, rows_of_update: int) -> Tensor:
        """The loss, scaled so that the gradients of all batches and ranks add up to those of the update."""
        scale = term.weight * self._distribution.num_readers / (rows_of_update * self._weight_per_row)
        scaled = term.mean if scale == 1.0 else term.mean * scale  # the usual case costs no operation
        return self._precision.scaler.scale(scaled)

    def _divisor(self, rows_of_update: int) -> float:
        """The divisor that the accumulated gradients still need; 0 if all rows have weight 0."""
        if self.objective.sums:
            return 1.0 / rows_of_update
        if not self.objective.weight_depends_on_content:
            return 1.0
        total = np.array([self._weight_of_update], dtype=np.float64)
        local = self._distribution.local
        is_local = self._distribution.is_local
        communicator = local.group if is_local and local is not None else self._communicator
        if communicator is not None and communicator.world_size > 1:
            communicator.allreduce(total, op="sum")
        predicted, weight = self._weight_per_row * rows_of_update, float(total[0])
        if is_local:  # the other ranks' rows are taken to weigh as much
            return weight / predicted * self._communicator.world_size / self._distribution.num_averaged
        self._next_weight_per_row = weight / rows_of_update if weight else self._weight_per_row
        return weight / predicted

    def _pass_without_rows(self) -> LossTerm:
        """Take part in a step without rows, because the other ranks wait for this rank's gradients.

        The last batch that had rows goes through the model once more, with weight 0; a user's step is called with it
        only if it has collectives of its own or the model is divided. Most layers would accept an empty
        batch, but a BatchNorm cannot normalize it. The buffers of the model and of the losses are restored afterwards,
        except the statistics that layers take over all ranks' rows, and parameters that only this batch uses get no
        gradient.
        """
        assert self.last_batch is not None, "a rank without rows in its first step remembers others"
        module = self._distribution.called
        layers = [layer for layer in module.modules() if isinstance(layer, CrossRankBatchNorm)]
        shared = {id(buffer) for layer in layers for buffer in layer.buffers()}
        buffers = (*module.buffers(), *self.objective.loss_buffers())
        of_rank = {id(buffer): buffer for buffer in buffers if id(buffer) not in shared}
        with (
            buffers_kept(of_rank.values()),
            _count_no_rows(layers),
            self._distribution.without_rows(),
        ):
            term = self._distribution.forward_backward(
                self.objective,
                self.last_batch,
                scaled=lambda term: self._precision.scaler.scale(term.mean * 0.0),
            ).term
        return LossTerm(mean=term.mean, weight=0.0)


@contextmanager
def _count_no_rows(layers: Sequence[CrossRankBatchNorm]) -> Iterator[None]:
    """Within this context this rank adds nothing to the statistics that layers take over all ranks' rows."""
    for layer in layers:
        layer.counts_rows = False
    try:
        yield
    finally:
        for layer in layers:
            layer.counts_rows = True
