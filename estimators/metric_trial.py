"""Tries the metrics of a fit on one row, before anything starts. Runs on the *driver*."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sparkdl.data import ParquetFeed
from sparkdl.errors import ParamError, TrainingError
from sparkdl.training.metrics import EpochMetrics
from sparkdl.training.objective import Objective
from sparkdl.training.precision import Precision
from sparkdl.training.validation import evaluating

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset
    from sparkdl.training.spec import TrainingSpec

_CPU = torch.device("cpu")


def try_metrics(spec: TrainingSpec, dataset: ParquetDataset) -> None:
    """Give each metric what a copy of the untrained model makes of the first row.

    Raises:
        ParamError: if a metric fails on it, naming it.
    """
    if not spec.metrics:
        return
    metrics = EpochMetrics(spec.metrics, _CPU)
    # Copies, as both may lie on a GPU; in full precision, as not every processor computes in a lower one.
    model, loss = copy.deepcopy(spec.model).to(_CPU), copy.deepcopy(spec.loss)
    trial = replace(spec, model=model, loss=loss, precision="float32")
    objective = Objective(trial, precision=Precision("float32", _CPU), device=_CPU)
    with ParquetFeed(dataset, columns=spec.columns(), batch_size=1, shuffle=False) as feed:
        batch = next(iter(feed.epoch(0)))
    with evaluating(model):
        found = objective.evaluate(model, batch)
        try:
            metrics.add(found, rows=1)
        except TrainingError as error:
            raise ParamError(
                f"Param metrics cannot be used with this model and its labels, tried on the first row. {error}"
            ) from error
