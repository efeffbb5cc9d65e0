"""One step of training on one rank: forward, exactly scaled backward, update. Runs on a *rank*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.training.columns import dtype_named, to_features, to_tensor
from sparkdl.training.finite import FiniteLossCheck
from sparkdl.training.losses import (
    LossFunction,
    LossTerm,
    compute_loss,
    match_targets,
    needs_global_weight,
    reduction_of,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sparkdl.collective import Communicator
    from sparkdl.training.spec import TrainingSpec

Batch = Mapping[str, npt.NDArray[np.generic] | Tensor]
"""Columns by name: arrays, or tensors that are on the device already."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: the detached mean loss of this rank's rows, its weight, and how many rows."""

    loss_mean: Tensor
    weight: float
    rows: int


class TrainingStep:
    """Applies batches to a module so that N ranks compute what one rank would on the joined batch.

    The wrapped module averages the gradients of the ranks. With ``w`` the weight of this rank's rows
    (their number, unless rows or classes are weighted), ``W`` that of all ranks' rows in the step and ``P``
    the number of ranks, the rank's mean loss is scaled by ``w * P / W`` before the backward pass; a loss that
    sums by ``w * P``.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        *,
        module: nn.Module,
        loss: LossFunction,
        optimizer: Optimizer,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._module = module
        self._loss = loss
        self._optimizer = optimizer
        self._communicator = communicator
        self.device = device
        self._finite = FiniteLossCheck(communicator, device)
        self._features_dtype = dtype_named(spec.features_dtype)
        self._label_dtype = dtype_named(spec.label_dtype)
        self._sums = reduction_of(self._loss) == "sum"
        self._global_weight = not self._sums and needs_global_weight(
            self._loss, weighted=spec.weight is not None, label_is_scalar=spec.label_shape == ()
        )
        self._last_batch: Batch | None = None

    def run(self, batch: Batch, *, rows_of_step: int, epoch: int, step: int, steps: int) -> StepResult:
        """Take one step together with all other ranks.

        Args:
            batch: this rank's columns; may hold 0 rows while other ranks have some.
            rows_of_step: rows of all ranks in this step.
            epoch: number of the epoch, from 1, for error messages.
            step: number of the step, from 1.
            steps: steps of the epoch.

        Raises:
            TrainingError: when the loss is not finite, as :class:`~sparkdl.training.finite.FiniteLossCheck` tells.
        """
        rows = len(batch[self._spec.label])
        self._optimizer.zero_grad(set_to_none=True)
        if rows:
            self._last_batch = batch
            term = self._forward(batch)
            self._finite.observe(term.mean, epoch=epoch, step=step)
            self._backward(term.mean, term.weight, rows_of_step)
        else:
            term = self._pass_without_rows(rows_of_step)
        self._optimizer.step()
        self._finite.settle(epoch=epoch, step=step, steps=steps)
        return StepResult(term.mean.detach(), term.weight, rows)

    def _forward(self, batch: Batch) -> LossTerm:
        features = to_features(batch[self._spec.features], self._features_dtype, self.device)
        targets = to_tensor(batch[self._spec.label], self._label_dtype, self.device)
        weights = None
        if self._spec.weight is not None:
            weights = to_tensor(batch[self._spec.weight], torch.float32, self.device)
        outputs = self._module(features)
        return compute_loss(self._loss, outputs, match_targets(self._loss, outputs, targets), weights)

    def _backward(self, loss_mean: Tensor, weight: float, rows_of_step: int) -> None:
        (loss_mean * self._scale(weight, rows_of_step)).backward()

    def _pass_without_rows(self, rows_of_step: int) -> LossTerm:
        """Take part in a step without rows, as the others wait for this rank's gradients.

        The last batch that had rows goes through the model once more and counts nothing. Zero rows would do
        for most layers, but a BatchNorm cannot normalize them; what the pass changes in buffers is put back.
        """
        assert self._last_batch is not None, "every rank has a row in its first step"
        kept = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}
        term = self._forward(self._last_batch)
        self._backward(term.mean, 0.0, rows_of_step)
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.copy_(kept[name])
        return LossTerm(mean=term.mean, weight=0.0)

    def _scale(self, weight: float, rows_of_step: int) -> float:
        world_size = self._communicator.world_size
        if self._sums:
            return weight * world_size
        total = float(rows_of_step)
        if self._global_weight:
            sums = np.array([weight], dtype=np.float64)
            if world_size > 1:
                self._communicator.allreduce(sums, op="sum")
            total = float(sums[0])
        return weight * world_size / total if total else 0.0
