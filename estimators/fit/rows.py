"""The training rows of fits: as Parquet in the Store, once for all fits on one DataFrame."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkdl.data import Store, use_materialized
from sparkdl.data.spark.columns import columns_of, faults_error, type_faults, with_doubles
from sparkdl.estimators.fit.inputs import column_names, vector_dtype
from sparkdl.estimators.fit.split import validation_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import timedelta

    from pyspark.sql import DataFrame

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams


@dataclass(frozen=True, kw_only=True)
class RowsNeeded:
    """The columns of a DataFrame that a fit writes, and how.

    Attributes:
        columns: names of the columns.
        store_url: URL of the Store.
        keep_for: how long rows stay in the Store after their last use.
        vector_dtype: dtype in which elements of vectors are written.
        allow_ragged: whether arrays may differ in length.
        doubles: names of the columns whose decimals become doubles.
        keeps_decimals: whether decimals among the features stay decimals.
        nullable: names of the columns that may have nulls.
    """

    columns: tuple[str, ...]
    store_url: str
    keep_for: timedelta
    vector_dtype: str
    allow_ragged: bool
    doubles: tuple[str, ...]
    keeps_decimals: bool
    nullable: tuple[str, ...]


def rows_needed(params: _TorchEstimatorParams) -> RowsNeeded:
    """Return the columns that a fit writes, and how; the Params have to be checked before."""
    store, caller = params.getStore(), params._caller
    prepares = caller._learns or params.getPrepareFeatures() is not None
    keeps_decimals = prepares and not caller._learns  # the user's function gets them unchanged
    features = [] if keeps_decimals else params.getFeaturesCols()
    return RowsNeeded(
        columns=tuple(column_names(params)),
        store_url=store.url,
        keep_for=store.keep_for,
        vector_dtype=caller._vector_dtype or vector_dtype(params.getModel()),
        allow_ragged=params.getPaddingValue() is not None or prepares,
        doubles=(*features, *params._label_names(), *filter(None, [params._weight_column()])),
        keeps_decimals=keeps_decimals,
        nullable=tuple(caller._nulls()),
    )


def check_column_types(params: _TorchEstimatorParams, dataset: DataFrame) -> None:
    """Check the types of all columns that a fit reads, by the schema of a DataFrame that has them.

    Raises:
        DataError: if columns cannot be used; the message names all of them.
    """
    schema = with_doubles(dataset, rows_needed(params).doubles).schema
    names = frozenset(column_names(params))
    fields = [field for field in schema if field.name in names]
    is_free = params._caller._learns or params.getPrepareFeatures() is not None
    numbers = {params._weight_column(), *([] if is_free else params.getFeaturesCols())}
    faults = type_faults(fields) | type_faults(
        (field for field in fields if field.name in numbers), numbers_only=True
    )
    columns = columns_of(field for field in fields if field.name not in faults)
    texts = [*faults.values(), *column_faults(params, {column.name: column for column in columns})]
    if texts:
        raise faults_error(texts)


def column_faults(params: _TorchEstimatorParams, columns: Mapping[str, Column]) -> Iterator[str]:
    """Yield what is wrong with columns, as far as kind, dtype and depth of arrays say.

    Args:
        params: Params of the fit.
        columns: columns of the fit by name; others are left out, such as those with known faults.
    """
    features, labels = (
        [columns[name] for name in names if name in columns]
        for names in (params.getFeaturesCols(), params._label_names())
    )
    yield from params._caller._faults(features, labels)
    weight, indicator = (
        columns.get(params._weight_column() or ""),
        columns.get(validation_column(params) or ""),
    )
    if weight is not None and weight.shape:
        yield f"Column {weight.name!r} holds arrays, and weightCol takes one number per row."
    if indicator is not None and (indicator.dtype != "bool" or indicator.shape):
        yield (
            f"Column {indicator.name!r} holds {'arrays of ' if indicator.shape else ''}{indicator.dtype}, and "
            "validationIndicatorCol takes a column of booleans."
        )


class TrainingRows:
    """The rows of one DataFrame for a known number of fits, which may use them at once, from several threads.

    When the first fit uses the rows, they are written, found in the Store, or read in place. They are kept until the
    last fit has used them. If a fit fails, they are released, and obtained again if another fit follows.

    Attributes:
        df: the DataFrame.
    """

    def __init__(self, dataset: DataFrame, needed: RowsNeeded, *, num_fits: int) -> None:
        self.df = dataset
        self._needed = needed
        self._num_left = num_fits
        self._num_open = 0
        self._is_given_up = False
        self._lock = threading.Lock()
        self._held = ExitStack()
        self._dataset: ParquetDataset | None = None

    @contextmanager
    def use(
        self, *, on_write: Callable[[], None], in_tasks: Callable[[int], None] | None = None
    ) -> Iterator[ParquetDataset]:
        """Give the rows to one fit.

        Args:
            on_write: function that is called before the rows are written; not called if nothing has to be written.
            in_tasks: function that the tasks that write the rows call with the number of their partition; None for
                none.

        Raises:
            DataError: if the columns cannot be used.
            StoreError: if the Store cannot be used.
        """
        with self._lock:
            if self._dataset is None:
                self._dataset = self._held.enter_context(self._obtain(on_write=on_write, in_tasks=in_tasks))
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

    def release(self) -> None:
        """Release the rows. To be called when no more fits will use them; further calls do nothing."""
        with self._lock:
            self._let_go()

    def _obtain(
        self, *, on_write: Callable[[], None], in_tasks: Callable[[int], None] | None
    ) -> AbstractContextManager[ParquetDataset]:
        needed = self._needed
        return use_materialized(
            with_doubles(self.df, needed.doubles),
            needed.columns,
            Store(needed.store_url, keep_for=needed.keep_for),
            vector_dtype=needed.vector_dtype,
            allow_ragged=needed.allow_ragged,
            nullable=needed.nullable,
            origin=self.df,
            on_write=on_write,
            in_tasks=in_tasks,
        )

    def _let_go(self) -> None:
        self._dataset, self._is_given_up = None, False
        self._held.close()


def share_rows(dataset: DataFrame, fits: Iterable[_TorchEstimatorParams]) -> list[TrainingRows]:
    """Return the rows for each of several fits; fits with compatible needs share one object, with all their columns."""
    needs = [rows_needed(params) for params in fits]
    kinds = [replace(needed, columns=(), doubles=()) for needed in needs]
    rows = {}
    for kind in set(kinds):
        alike = [needed for needed, other in zip(needs, kinds, strict=True) if other == kind]
        joint = replace(
            kind,
            columns=tuple(dict.fromkeys(name for needed in alike for name in needed.columns)),
            doubles=tuple(dict.fromkeys(name for needed in alike for name in needed.doubles)),
        )
        rows[kind] = TrainingRows(dataset, joint, num_fits=len(alike))
    return [rows[kind] for kind in kinds]
