"""Tries one step on the first rows, before anything starts: the user's own step, its changes of batches, the metrics.

Runs on the *driver*.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from sparkdl.data import ParquetFeed
from sparkdl.errors import ParamError, SparkdlError
from sparkdl.estimators.metric_trial import try_metrics
from sparkdl.model.architecture import evaluating
from sparkdl.training.objective import Objective, Place
from sparkdl.training.probe import TrialGradients, trial_copy, try_optimizer
from sparkdl.training.random_state import random_numbers_apart
from sparkdl.training.step import single_rows_allowed
from sparkdl.training.update import Precision, make_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from sparkdl.data import ParquetDataset
    from sparkdl.estimators.metric_trial import Evaluated
    from sparkdl.training.objective import Batch, Evaluation
    from sparkdl.training.probe import Gradients
    from sparkdl.training.spec import TrainingSpec

_CPU = torch.device("cpu")

T = TypeVar("T")


def try_step(spec: TrainingSpec, dataset: ParquetDataset) -> Gradients | None:
    """Have a copy of the untrained model take a step as ranks will, where functions of the user take part.

    Returns:
        What gradients the user's own step left; None where losses find them.

    Raises:
        ParamError: if one of the functions fails, naming the Param.
    """
    if not (spec.metrics or spec.user_step or spec.augment):
        return None
    # Copies, as all may lie on a GPU; in full precision, as not every processor computes in a lower one.
    (model, heads), shared = trial_copy((spec.model, spec.heads), spec.model)
    model.to(_CPU)
    versions = [parameter._version for parameter in shared]
    trial = replace(spec, model=model, heads=heads, precision="float32")
    objective = Objective(trial, precision=Precision("float32", _CPU), device=_CPU)
    # Of two rows where a step may compare them with each other.
    num_rows = min(2, spec.batch_size) if spec.user_step else 1
    with ParquetFeed(dataset, columns=spec.columns(), batch_size=num_rows, shuffle=False) as feed:
        rows = next(iter(feed.epoch(0)))
    whole_batches = partial(_whole_batches, trial, dataset, objective, model)
    with random_numbers_apart(_CPU):
        batch = _try("augment", lambda: objective.prepare(rows, place=Place(0, 1, 1)))
        if not spec.user_step:
            with evaluating(model):
                found = _try("loss", lambda: objective.evaluate(model, batch))
            try_metrics(spec.metrics, (found, objective.num_rows(rows)), whole_batches, dataset.num_rows)
            return None
        gradients = TrialGradients(model, shared)
        found = _try_user_step(objective, model, batch, gradients)
        if versions != [parameter._version for parameter in shared]:
            raise ParamError(
                "Param trainStep changes weights of the model by itself, tried on the first rows. Return the loss, and "
                "leave the weights to the optimizer."
            )
        try_optimizer(make_optimizer(spec.optimizer, model), shared)
        if spec.validation_rows is not None:
            with evaluating(model):
                _try(
                    "trainStep without gradients, as validation calls it,",
                    lambda: objective.evaluate(model, batch),
                )
        try_metrics(spec.metrics, (found, objective.num_rows(rows)), whole_batches, dataset.num_rows)
        return gradients.found


def _try_user_step(
    objective: Objective, model: nn.Module, batch: Batch, gradients: TrialGradients
) -> Evaluation:
    with single_rows_allowed(model.train()):
        found = _try("trainStep", lambda: objective.evaluate(model, batch))
        loss = found.term.mean
        if loss.requires_grad:
            _try("trainStep", lambda: gradients.backward(loss))
    if not gradients.found.are_there:
        raise ParamError(
            "Param trainStep returned a loss in which no weight of the model has a part. Find it by what the model "
            "returns, without detach(), item() or torch.no_grad()."
        )
    return found


def _whole_batches(
    spec: TrainingSpec, dataset: ParquetDataset, objective: Objective, model: nn.Module
) -> Iterator[Evaluated]:
    """Yield what the model makes of the rows from the first on, in batches as a rank has them, without another step."""
    with ParquetFeed(dataset, columns=spec.columns(), batch_size=spec.batch_size, shuffle=False) as feed:
        for step, rows in enumerate(feed.epoch(0), start=1):
            batch = _try("augment", partial(objective.prepare, rows, place=Place(0, 1, step)))
            name = "trainStep" if spec.user_step else "loss"
            with single_rows_allowed(model.train()) if spec.user_step else evaluating(model):
                found = _try(name, partial(objective.evaluate, model, batch))
            yield found, objective.num_rows(rows)


def _try(name: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except SparkdlError:
        raise
    except Exception as error:
        raise ParamError(f"Param {name} failed on the first rows: {type(error).__name__}: {error}") from error
