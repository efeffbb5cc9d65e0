"""What a fit trains: the model, its loss and its metrics, from the Params or learned from the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.model.inputs import PrepareFunction
    from sparkdl.training.metrics import Metric
    from sparkdl.training.spec import AugmentFunction


@dataclass(frozen=True)
class Recipe:
    """What a fit trains. A ready-made estimator learns it from its rows.

    Attributes:
        model: model to train.
        prepare: function that makes the model's inputs from the feature columns; None if the model takes the columns
            unchanged.
        loss: loss of the training, or one for each label column; None if a trainStep computes it.
        augment: function that changes batches in training; None for no changes.
        num_classes: number of classes; None if the model predicts numbers, or it is not known yet.
        metrics: metrics, or names that stand for them, by name.
    """

    model: nn.Module
    prepare: PrepareFunction | None
    loss: Any
    augment: AugmentFunction | None = None
    num_classes: int | None = None
    metrics: Mapping[str, Metric | str] = field(default_factory=dict)

    @classmethod
    def of(cls, params: _TorchEstimatorParams) -> Recipe:
        """Return the recipe of a fit that learns nothing from its rows: the values of its Params."""
        return cls(
            params.getModel(),
            params.getPrepareFeatures(),
            params.getLoss() if params.isDefined(params.loss) else None,
            params.getAugment(),
            metrics=params.getMetrics(),
        )

    def by_param(self) -> dict[str, Any]:
        """Return the values of the Params ``model``, ``prepareFeatures``, ``loss`` and ``augment``, where not None."""
        values = {
            "model": self.model,
            "prepareFeatures": self.prepare,
            "loss": self.loss,
            "augment": self.augment,
        }
        return {name: value for name, value in values.items() if value is not None}
