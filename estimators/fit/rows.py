"""The training rows of fits: as Parquet in the Store, once for all fits on one DataFrame."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sparkdl.data import Store, use_materialized
from sparkdl.data.spark.columns import check_types, columns_of, with_doubles
from sparkdl.estimators.fit.inputs import column_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
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
        numbers: names of the columns that have to hold numbers.
        doubles: names of the columns whose decimals become doubles.
        keeps_decimals: whether decimals among the features stay decimals.
        nullable: names of the columns that may have nulls.
        checks: functions that check the types of the feature columns.
    """

    columns: tuple[str, ...]
    store_url: str
    keep_for: timedelta
    vector_dtype: str
    allow_ragged: bool
    numbers: tuple[str, ...]
    doubles: tuple[str, ...]
    keeps_decimals: bool
    nullable: tuple[str, ...] = ()
    checks: tuple[tuple[tuple[str, ...], Callable[[list[Column]], None]], ...] = field(
        default=(), compare=False
    )


def rows_needed(params: _TorchEstimatorParams) -> RowsNeeded:
    """Return the columns that a fit writes, and how; the Params have to be checked before."""
    store = params.getStore()
    prepares = params._learns or params.getPrepareFeatures() is not None
    keeps_decimals = prepares and not params._learns  # the user's function gets them unchanged
    weight = params._weight_column()
    weights = [] if weight is None else [weight]
    features = [] if keeps_decimals else params.getFeaturesCols()
    return RowsNeeded(
        columns=tuple(column_names(params)),
        store_url=store.url,
        keep_for=store.keep_for,
        vector_dtype=params._vector_dtype(),
        allow_ragged=params.getPaddingValue() is not None or prepares,
        numbers=(*([] if prepares else features), *weights),
        doubles=(*features, *params._label_names(), *weights),
        keeps_decimals=keeps_decimals,
        nullable=tuple(params._nulls()),
        checks=((tuple(params.getFeaturesCols()), params._check_schema),),
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
        rows = with_doubles(self.df, needed.doubles)
        check_types(rows.schema, needed.columns)
        if needed.numbers:
            check_types(rows.schema, needed.numbers, numbers_only=True)
        for names, check in needed.checks:
            check(columns_of(check_types(rows.schema, names)))
        return use_materialized(
            rows,
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
    alike: dict[RowsNeeded, list[RowsNeeded]] = {}
    for needed in needs:
        alike.setdefault(_kind(needed), []).append(needed)
    rows = {
        kind: TrainingRows(dataset, _union(kind, members), num_fits=len(members))
        for kind, members in alike.items()
    }
    return [rows[_kind(needed)] for needed in needs]


def _kind(needed: RowsNeeded) -> RowsNeeded:
    """Return the needs that have to be equal for fits to share rows."""
    return replace(needed, columns=(), numbers=(), doubles=(), checks=())


def _union(kind: RowsNeeded, members: Iterable[RowsNeeded]) -> RowsNeeded:
    """Return the joined needs of several fits."""
    needs = list(members)

    def union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for group in names for name in group))

    return replace(
        kind,
        columns=union(needed.columns for needed in needs),
        numbers=union(needed.numbers for needed in needs),
        doubles=union(needed.doubles for needed in needs),
        checks=tuple(check for needed in needs for check in needed.checks),
    )
