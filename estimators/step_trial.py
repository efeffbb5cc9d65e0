"""Tries one step on the first row, before anything starts: the user's own step, its changes of batches, the metrics.

Runs on the *driver*.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from sparkdl.data import ParquetFeed
from sparkdl.errors import ParamError, SparkdlError, TrainingError
from sparkdl.training.metrics import EpochMetrics
from sparkdl.training.objective import Objective, Place
from sparkdl.training.precision import Precision
from sparkdl.training.trial_copy import trial_copy
from sparkdl.training.validation import evaluating

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.data import ParquetDataset
    from sparkdl.training.spec import TrainingSpec

_CPU = torch.device("cpu")

T = TypeVar("T")


def try_step(spec: TrainingSpec, dataset: ParquetDataset) -> None:
    """Have a copy of the untrained model evaluate the first row as ranks will, where functions of the user take part.

    Raises:
        ParamError: if one of them fails on it, naming the Param.
    """
    if not (spec.metrics or spec.user_step or spec.augment):
        return
    # Copies, as all may lie on a GPU; in full precision, as not every processor computes in a lower one.
    (model, heads), shared = trial_copy((spec.model, spec.heads), spec.model)
    model.to(_CPU)
    versions = [parameter._version for parameter in shared]
    trial = replace(spec, model=model, heads=heads, precision="float32")
    objective = Objective(trial, precision=Precision("float32", _CPU), device=_CPU)
    with ParquetFeed(dataset, columns=spec.columns(), batch_size=1, shuffle=False) as feed:
        row = next(iter(feed.epoch(0)))
    with evaluating(model):
        batch = _try("augment", lambda: objective.prepare(row, place=Place(0, 1, 1)))
        found = _try("trainStep" if spec.user_step else "loss", lambda: objective.evaluate(model, batch))
        if spec.metrics and found.outputs is None:
            raise ParamError(
                "Param metrics need the model's outputs, and trainStep returns the loss alone. Return a tuple of the "
                "loss and the outputs."
            )
        try:
            EpochMetrics(spec.metrics, _CPU).add(found, rows=1)
        except TrainingError as error:
            raise ParamError(
                f"Param metrics cannot be used with this model and its labels, tried on the first row. {error}"
            ) from error
    if versions != [parameter._version for parameter in shared]:
        raise ParamError(
            "Param trainStep changes weights of the model by itself, tried on the first row. Return the loss, and "
            "leave the weights to the optimizer."
        )


def _try(name: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except SparkdlError:
        raise
    except Exception as error:
        raise ParamError(f"Param {name} failed on the first row: {type(error).__name__}: {error}") from error
