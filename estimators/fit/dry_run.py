"""Tries the metrics and one training step on the first rows, before the ranks start.

The metrics are computed on the outputs of the untrained model. The step is tried if functions of the user take part in
it: a trainStep, augment, or metrics.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from sparkdl import data
from sparkdl.errors import ParamError, TrainingError
from sparkdl.estimators.fit.probe import TrialGradients, trial_copy, try_optimizer
from sparkdl.foreign_errors import errors_as
from sparkdl.model.architecture import evaluating
from sparkdl.random_state import random_numbers_apart
from sparkdl.training.device_batches import single_rows_allowed
from sparkdl.training.metrics import EpochMetrics
from sparkdl.training.objective import Evaluation, Objective, StepPosition
from sparkdl.training.precision import Precision
from sparkdl.training.update import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from sparkdl.data import ParquetDataset
    from sparkdl.estimators.fit.probe import Gradients
    from sparkdl.training.metrics import Metric
    from sparkdl.training.objective import Batch
    from sparkdl.training.spec import TrainingSpec


logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_NUM_BATCHES = 4
"""Number of batches on which a metric that fails on one row is tried again; most such metrics then work."""

Evaluated: TypeAlias = tuple[Evaluation, int]
"""The evaluation of a batch, and its number of rows."""


def try_metrics(
    metrics: Mapping[str, Metric],
    first: Evaluated,
    whole_batches: Callable[[], Iterable[Evaluated]],
    num_rows: int,
) -> None:
    """Update each metric with the first rows and compute it, as at the end of an epoch.

    Many metrics cannot be updated or computed with one or two rows (R2Score needs two, others both classes). A metric
    that fails is therefore tried again on whole batches, until it can be computed. A ValueError can be due to too few
    rows even then, for example if a metric needs a thousand of them. If there are more rows than were tried, a
    ValueError therefore leads only to a warning, and the fit starts. Any other error is a fault of the metric, and so
    is a value that is not one number.

    Args:
        metrics: metrics by name.
        first: evaluation of the first one or two rows.
        whole_batches: function that yields evaluations of whole batches, from the first row on; called only if a metric
            fails on the first rows.
        num_rows: total number of rows.

    Raises:
        ParamError: if a metric cannot be used; the message names it.
    """
    if metrics and first[0].outputs is None:
        raise ParamError(
            "Param metrics need the model's outputs, and trainStep returns the loss alone. Return a tuple of the loss "
            "and the outputs."
        )
    trials = {name: EpochMetrics({name: metric}, _CPU) for name, metric in metrics.items()}
    failing = [name for name, trial in trials.items() if _failure(trial, first)]
    trials = {name: EpochMetrics({name: metrics[name]}, _CPU) for name in failing}
    tried = 0
    errors: dict[str, TrainingError] = {}
    for batch in islice(whole_batches(), _NUM_BATCHES) if trials else ():
        tried += batch[1]
        errors = {name: error for name, trial in trials.items() if (error := _failure(trial, batch))}
        trials = {name: trials[name] for name in errors}
        if not trials:
            break
    for error in errors.values():
        if not isinstance(error.__cause__, ValueError) or tried >= num_rows:
            raise _refusal(error, f"the first {tried} rows") from error
        logger.warning(
            "After the first %d of %d rows: %s. The fit starts nevertheless; it fails in its first epoch if the "
            "metric cannot be computed from all rows either.",
            tried,
            num_rows,
            str(error).rstrip("."),
        )


def _failure(trial: EpochMetrics, batch: Evaluated) -> TrainingError | None:
    """Update one metric with a batch; return the error if it cannot be updated or computed, else None.

    Raises:
        ParamError: if the metric cannot be used, whatever the rows are.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about few rows do not apply to an epoch
        try:
            trial.add(*batch)
            trial.try_to_compute()
        except TrainingError as error:
            if error.__cause__ is None:  # it is not one number
                raise _refusal(error, "the first rows") from error
            return error
    return None


def _refusal(error: TrainingError, tried_on: str) -> ParamError:
    return ParamError(
        f"Param metrics cannot be used with this model and its labels, tried on {tried_on}. {error}"
    )


T = TypeVar("T")


def try_step(spec: TrainingSpec, dataset: ParquetDataset) -> Gradients | None:
    """Take a training step with a copy of the untrained model, as ranks will, if functions of the user take part.

    Returns:
        The gradients that the user's own step left; None without such a step.

    Raises:
        ParamError: if one of the functions fails; the message names the Param.
    """
    if not (spec.metrics or spec.user_step or spec.augment):
        return None
    # Copies, because model and losses may be on a GPU; in float32, because not every CPU supports a lower precision.
    (model, heads), shared = trial_copy((spec.model, spec.heads), spec.model)
    model.to(_CPU)
    versions = [parameter._version for parameter in shared]
    trial = replace(spec, model=model, heads=heads, precision="float32")
    objective = Objective(trial, precision=Precision("float32", _CPU), device=_CPU)
    # Two rows for a user's step, which may compare rows with each other.
    num_rows = min(2, spec.batch_size) if spec.user_step else 1
    with data.ParquetFeed(dataset, columns=spec.columns(), batch_size=num_rows, shuffle=False) as feed:
        rows = next(iter(feed.epoch(0)))
    whole_batches = partial(_whole_batches, trial, dataset, objective, model)
    with random_numbers_apart(_CPU):
        batch = _try("augment", lambda: objective.prepare(rows, position=StepPosition(0, 1, 1, 0)))
        if not spec.user_step:
            with evaluating(model):
                evaluation = _try("loss", lambda: objective.evaluate(model, batch))
            try_metrics(spec.metrics, (evaluation, objective.num_rows(rows)), whole_batches, dataset.num_rows)
            return None
        gradients = TrialGradients(model, shared)
        evaluation = _try_user_step(objective, model, batch, gradients)
        if versions != [parameter._version for parameter in shared]:
            raise ParamError(
                "Param trainStep changed weights of the model when it was tried on the first rows. Return the loss; "
                "the optimizer updates the weights."
            )
        try_optimizer(make_optimizer(spec.optimizer, model), shared)
        if spec.validation_rows is not None:
            with evaluating(model):
                _try(
                    "trainStep without gradients, as validation calls it,",
                    lambda: objective.evaluate(model, batch),
                )
        try_metrics(spec.metrics, (evaluation, objective.num_rows(rows)), whole_batches, dataset.num_rows)
        return gradients.found


def _try_user_step(
    objective: Objective, model: nn.Module, batch: Batch, gradients: TrialGradients
) -> Evaluation:
    with single_rows_allowed(model.train()):
        evaluation = _try("trainStep", lambda: objective.evaluate(model, batch))
        loss = evaluation.term.mean
        if loss.requires_grad:
            _try("trainStep", lambda: gradients.backward(loss))
    if not gradients.found.any_found:
        raise ParamError(
            "Param trainStep returned a loss that does not depend on any weight of the model. Compute the loss from "
            "the model's outputs, without detach(), item() or torch.no_grad()."
        )
    return evaluation


def _whole_batches(
    spec: TrainingSpec, dataset: ParquetDataset, objective: Objective, model: nn.Module
) -> Iterator[Evaluated]:
    """Yield evaluations of batches of a rank's size, from the first row on, without further updates of weights."""
    with data.ParquetFeed(dataset, columns=spec.columns(), batch_size=spec.batch_size, shuffle=False) as feed:
        for step, rows in enumerate(feed.epoch(0), start=1):
            batch = _try("augment", partial(objective.prepare, rows, position=StepPosition(0, 1, step, 0)))
            name = "trainStep" if spec.user_step else "loss"
            with single_rows_allowed(model.train()) if spec.user_step else evaluating(model):
                evaluation = _try(name, partial(objective.evaluate, model, batch))
            yield evaluation, objective.num_rows(rows)


def _try(name: str, function: Callable[[], T]) -> T:
    with errors_as(ParamError, f"Param {name} failed on the first rows"):
        return function()
