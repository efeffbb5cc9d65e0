"""What a fit makes small: from a batch of columns to the model's outputs and their loss. Runs on a *rank*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.training.columns import dtype_named, to_features, to_tensor
from sparkdl.training.losses import (
    LossTerm,
    compute_loss,
    match_targets,
    needs_global_weight,
    reduction_of,
)

if TYPE_CHECKING:
    from sparkdl.training.precision import Precision
    from sparkdl.training.spec import TrainingSpec

Batch = Mapping[str, npt.NDArray[np.generic] | Tensor]
"""Columns by name: arrays, or tensors that are on the device already."""


@dataclass(frozen=True)
class Evaluation:
    """What a model made of a batch.

    Attributes:
        outputs: what the model returned, in the precision of the loss.
        targets: the labels, as the loss compared them.
        weights: of the rows, ``(rows,)``; None where each counts once.
        term: the loss, with a graph where gradients are wanted.
    """

    outputs: Tensor
    targets: Tensor
    weights: Tensor | None
    term: LossTerm


class Objective:
    """Applies a module to batches and compares what comes out with their labels.

    Args:
        spec: names the columns and their dtypes, and holds the loss.
        precision: in which the module computes.
        device: of the module.

    Attributes:
        sums: whether the loss is a sum over the rows, not their mean.
        finds_weight: whether the weight of a batch depends on what is in it, not on the number of its rows alone.
    """

    def __init__(self, spec: TrainingSpec, *, precision: Precision, device: torch.device) -> None:
        self._spec = spec
        self._loss = spec.loss.to(device) if isinstance(spec.loss, nn.Module) else spec.loss
        self._precision = precision
        self._device = device
        self._features_dtype = dtype_named(spec.features_dtype)
        self._label_dtype = dtype_named(spec.label_dtype)
        self.sums = reduction_of(self._loss) == "sum"
        self.finds_weight = not self.sums and needs_global_weight(
            self._loss, weighted=spec.weight is not None, label_is_scalar=spec.label_shape == ()
        )

    def num_rows(self, batch: Batch) -> int:
        """How many rows a batch has."""
        return len(batch[self._spec.label])

    def evaluate(self, module: nn.Module, batch: Batch) -> Evaluation:
        """Apply the module, wrapped or not and in whichever mode it is, to a batch of one row at least."""
        features = to_features(batch[self._spec.features], self._features_dtype, self._device)
        targets = to_tensor(batch[self._spec.label], self._label_dtype, self._device)
        weights = None
        if self._spec.weight is not None:
            weights = to_tensor(batch[self._spec.weight], torch.float32, self._device)
        with self._precision.computing():
            outputs = module(features)
        outputs = self._precision.for_loss(outputs)
        targets = match_targets(self._loss, outputs, targets)
        return Evaluation(outputs, targets, weights, compute_loss(self._loss, outputs, targets, weights))
