"""The training rows of fits: as Parquet in the Store, once for all fits on one DataFrame. Runs on the *driver*."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkdl.data import Store, use_materialized
from sparkdl.estimators.fit_inputs import column_names
from sparkdl.training.columns import dtype_name, parameter_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import timedelta

    from pyspark.sql import DataFrame

    from sparkdl.data import ParquetDataset
    from sparkdl.estimators.params import _TorchEstimatorParams


@dataclass(frozen=True, kw_only=True)
class RowsNeeded:
    """What a fit needs to be written of a DataFrame.

    Attributes:
        columns: names of the columns.
        store_url: the Store.
        keep_for: how long rows stay there after their last use.
        vector_dtype: of the elements of vectors.
    """

    columns: tuple[str, ...]
    store_url: str
    keep_for: timedelta
    vector_dtype: str


def rows_needed(params: _TorchEstimatorParams) -> RowsNeeded:
    """Return what the fit of an estimator needs; its Params are checked already."""
    store = params.getStore()
    dtype = dtype_name(parameter_dtype(params.getModel()))
    return RowsNeeded(
        columns=tuple(column_names(params)),
        store_url=store.url,
        keep_for=store.keep_for,
        vector_dtype="float64" if dtype == "float64" else "float32",
    )


class TrainingRows:
    """The rows of one DataFrame for a known number of fits, which may use them at once, from several threads.

    They are written, found in the Store or read where they lie when the first fit uses them, and held there until
    the last one has; with a fit that fails they are let go, and obtained anew should another one follow.
    """

    def __init__(self, dataset: DataFrame, needed: RowsNeeded, *, num_fits: int) -> None:
        self._df = dataset
        self._needed = needed
        self._num_left = num_fits
        self._num_open = 0
        self._is_given_up = False
        self._lock = threading.Lock()
        self._held = ExitStack()
        self._dataset: ParquetDataset | None = None

    @contextmanager
    def use(self, on_write: Callable[[], None]) -> Iterator[ParquetDataset]:
        """Give the rows to one fit; ``on_write`` is called before they are written, by the fit that has that done.

        Raises:
            DataError: if the columns cannot be used.
            StoreError: if the Store cannot.
        """
        with self._lock:
            if self._dataset is None:
                self._dataset = self._held.enter_context(self._obtain(on_write))
            dataset = self._dataset
            self._num_open += 1
        try:
            yield dataset
        except BaseException:
            self._is_given_up = True
            raise
        finally:
            with self._lock:
                self._num_open -= 1
                self._num_left -= 1
                if not self._num_open and (self._is_given_up or self._num_left <= 0):
                    self._let_go()

    def let_go(self) -> None:
        """Hold the rows no longer, for fits that will not come; doing so again does nothing."""
        with self._lock:
            self._let_go()

    def _obtain(self, on_write: Callable[[], None]) -> AbstractContextManager[ParquetDataset]:
        needed = self._needed
        return use_materialized(
            self._df,
            needed.columns,
            Store(needed.store_url, keep_for=needed.keep_for),
            vector_dtype=needed.vector_dtype,
            numbers_only=True,
            on_write=on_write,
        )

    def _let_go(self) -> None:
        self._dataset, self._is_given_up = None, False
        self._held.close()


def share_rows(dataset: DataFrame, fits: Iterable[_TorchEstimatorParams]) -> list[TrainingRows]:
    """Return the rows for each of several fits: one object, with the columns of all, for those that need like rows."""
    each = [rows_needed(params) for params in fits]
    columns: dict[RowsNeeded, dict[str, None]] = {}
    counts: dict[RowsNeeded, int] = {}
    for needed in each:
        kind = replace(needed, columns=())
        columns.setdefault(kind, {}).update(dict.fromkeys(needed.columns))
        counts[kind] = counts.get(kind, 0) + 1
    rows = {
        kind: TrainingRows(dataset, replace(kind, columns=tuple(names)), num_fits=counts[kind])
        for kind, names in columns.items()
    }
    return [rows[replace(needed, columns=())] for needed in each]
