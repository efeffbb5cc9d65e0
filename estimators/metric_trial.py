"""Tries the metrics of a fit on what the untrained model makes of the first rows. Runs on the *driver*."""

from __future__ import annotations

import logging
import warnings
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import torch

from sparkdl.errors import ParamError, TrainingError
from sparkdl.training.metrics import EpochMetrics
from sparkdl.training.objective import Evaluation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sparkdl.training.metrics import Metric

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_NUM_BATCHES = 4
"""Of the size that a rank has: what makes a metric fail on a few rows that it has after a whole epoch is hardly there
in so many, and a driver has them through a model soon."""

Evaluated: TypeAlias = tuple[Evaluation, int]
"""What a model made of a batch, and of how many rows."""


def try_metrics(
    metrics: Mapping[str, Metric],
    first: Evaluated,
    whole_batches: Callable[[], Iterable[Evaluated]],
    num_rows: int,
) -> None:
    """Have each metric take in the first rows and, as at the end of an epoch, be computed.

    Many metrics cannot be computed from a row or two (R2Score wants two, others both classes), or do not take them in.
    One that fails is therefore tried again on whole batches, until it can be computed. A ValueError may even then be
    about the rows, as where a metric wants a thousand of them: unless those were all the rows there are, it is warned
    of, and the ranks will tell. Any other error is one of the metric itself, and so is a value that is not one number.

    Args:
        metrics: by name.
        first: one row or two.
        whole_batches: gives the rows from the first on; asked for where a metric cannot be computed.
        num_rows: that there are.

    Raises:
        ParamError: if a metric cannot be used, naming it.
    """
    if metrics and first[0].outputs is None:
        raise ParamError(
            "Param metrics need the model's outputs, and trainStep returns the loss alone. Return a tuple of the loss "
            "and the outputs."
        )
    trials = [_Trial(name, metric) for name, metric in metrics.items()]
    failing = [trial for trial in trials if trial.failure(first)]
    for trial in failing:
        trial.begin()
    tried, errors = 0, []
    for batch in islice(whole_batches(), _NUM_BATCHES) if failing else ():
        tried += batch[1]
        failures = [(trial, trial.failure(batch)) for trial in failing]
        failing = [trial for trial, error in failures if error]
        errors = [error for _, error in failures if error]
        if not failing:
            break
    for error in errors:
        if not isinstance(error.__cause__, ValueError) or tried >= num_rows:
            raise _refusal(error, f"the first {tried} rows") from error
        logger.warning(
            "After the first %d of %d rows: %s. The fit starts nevertheless, and fails in its first epoch where "
            "that is so for all rows.",
            tried,
            num_rows,
            str(error).rstrip("."),
        )


class _Trial:
    """A metric by itself, so that one that fails keeps no other from being tried."""

    def __init__(self, name: str, metric: Metric) -> None:
        self._metrics = {name: metric}
        self.begin()

    def begin(self) -> None:
        """Forget all that was taken in."""
        self._running = EpochMetrics(self._metrics, _CPU)

    def failure(self, batch: Evaluated) -> TrainingError | None:
        """Have the metric take in a batch; return why it cannot be computed then, or None if it can.

        Raises:
            ParamError: if it cannot be used whatever the rows are.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is said of a few rows is true of no epoch
            try:
                self._running.add(*batch)
            except TrainingError as error:
                self.begin()  # it may have taken in half of the batch
                return error
            try:
                self._running.try_to_compute()
            except TrainingError as error:
                if error.__cause__ is None:  # it is not one number
                    raise _refusal(error, "the first rows") from error
                return error
        return None


def _refusal(error: TrainingError, tried_on: str) -> ParamError:
    return ParamError(
        f"Param metrics cannot be used with this model and its labels, tried on {tried_on}. {error}"
    )
