"""Fits of one DataFrame under several Param maps: what ``fitMultiple`` and ``fit`` check and give.

Runs on the *driver*.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparkdl.data.spark.columns import check_frame
from sparkdl.errors import ParamError, ParamTypeError
from sparkdl.estimators.checked_params import check_param_map
from sparkdl.estimators.place_of_fit import ALONE
from sparkdl.estimators.training_rows import share_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from sparkdl.estimators.fitting_estimator import FittingEstimator
    from sparkdl.estimators.nested_runs import NestedRuns
    from sparkdl.estimators.torch_model import TorchModel

M = TypeVar("M", bound="TorchModel")
E = TypeVar("E", bound="FittingEstimator[Any]")


class FittedModels(Iterator[tuple[int, M]], Generic[M]):
    """Gives ``(index, model)`` for each Param map, the model being fitted when it is asked for.

    Several threads may ask at once, each for another model, as ``CrossValidator`` does with a ``parallelism``. The
    rows are written once, with the columns of all maps, and held until the last model is fitted or the iterator is
    dropped. In MLflow each fit is a run of its own, all of them nested under one.
    """

    def __init__(
        self, dataset: DataFrame, estimators: Sequence[FittingEstimator[M]], runs: NestedRuns | None = None
    ) -> None:
        self._df = dataset
        self._estimators = list(estimators)
        self._runs = runs
        self._rows = share_rows(dataset, [each.params_of_fit() for each in self._estimators])
        self._indices = iter(range(len(self._estimators)))
        self._lock = threading.Lock()
        for rows in set(self._rows):
            weakref.finalize(self, rows.let_go)

    def __next__(self) -> tuple[int, M]:
        with self._lock:
            index = next(self._indices)
        place = ALONE if self._runs is None else self._runs.place(index)
        try:
            return index, self._estimators[index]._fit_rows(self._df, self._rows[index], place)
        except BaseException:
            if self._runs is not None:
                self._runs.end_as_failed()
            raise

    def next(self) -> tuple[int, M]:
        """Do what ``next(iterator)`` does, as iterators of pyspark have it too."""
        return self.__next__()


def check_rows_to_fit(dataset: Any) -> None:
    """Check that what is to be fitted on is a DataFrame of Spark that ends.

    Raises:
        DataError: if it is something else, or a stream.
    """
    check_frame(dataset, "fit", of_streams="; the model's transform takes streams")


def with_param_maps(estimator: E, maps: Sequence[dict[Any, Any]]) -> list[E]:
    """Return a checked copy of an estimator for each Param map; each of several keeps checkpoints of its own.

    Raises:
        ParamError: saying which map cannot work, and why.
    """
    copies = []
    for index, param_map in enumerate(maps):
        try:
            check_param_map(estimator, param_map)
            copy = estimator.copy(param_map)
            copy.check_values()
        except ParamError as error:
            raise type(error)(f"In the Param map with index {index}: {error}") from error
        folder = copy.params_of_fit().getCheckpointDir()
        if folder is not None and len(maps) > 1:  # each is another fit
            copy.setParams(checkpointDir=f"{folder.rstrip('/')}/fit-{index}")
        copies.append(copy)
    return copies


def check_maps(maps: Any) -> None:
    """Check that it is a sequence of Param maps.

    Raises:
        ParamTypeError: if it is something else.
    """
    if not isinstance(maps, (list, tuple)) or not all(isinstance(each, dict) for each in maps):
        raise ParamTypeError(
            f"fitMultiple takes a list of Param maps, got {type(maps).__name__}. Write [{{estimator.epochs: 3}}]."
        )
