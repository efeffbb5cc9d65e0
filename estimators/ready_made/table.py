"""What is learned of the columns of a table: scales of numbers, categories. Runs on the *driver*."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl.data import ParquetFeed
from sparkdl.errors import DataError, ParamError
from sparkdl.networks.standardization import Moments
from sparkdl.networks.tabular import TabularInputs, joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice

MOST_CATEGORIES = 100_000
_ROWS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Table:
    """What a table holds.

    Attributes:
        inputs: makes the network's inputs of its columns.
        scales: of the numbers.
        label_scale: of the labels, where they are numbers to be told.
        is_plain: whether there is one column alone, of numbers, which a network may take as it is.
    """

    inputs: TabularInputs
    scales: Moments
    label_scale: Moments
    is_plain: bool


def learn_table(
    dataset: ParquetDataset,
    features: Sequence[str],
    *,
    categorical: Sequence[str],
    training: RowChoice | None,
    label: str | None = None,
) -> Table:
    """Read the rows once and return what they hold.

    Args:
        dataset: the rows.
        features: names of the feature columns.
        categorical: those whose numbers stand for categories.
        training: the rows that are trained on, of which alone is learned; None for all.
        label: column of labels whose scale is to be found.

    Raises:
        ParamError: if a categorical column is none of the feature columns.
        DataError: if a column holds what a table cannot have, or numbers that are not finite.
    """
    unknown = [name for name in categorical if name not in features]
    if unknown:
        raise ParamError(
            f"Param categoricalCols names {', '.join(unknown)}, which featuresCol does not. The feature columns are: "
            f"{', '.join(features)}."
        )
    columns = [dataset.column(name) for name in features]
    names = [column.name for column in columns if column.kind == "string" or column.name in categorical]
    for column in columns:
        _check_kind(column, is_category=column.name in names)
    numeric = tuple(column.name for column in columns if column.name not in names)
    scales, label_scale = Moments(), Moments()
    found: dict[str, set[Any]] = {name: set() for name in names}
    wanted = [*features, *([label] if label is not None else [])]
    with ParquetFeed(
        dataset,
        columns=list(dict.fromkeys(wanted)),
        batch_size=_ROWS_AT_ONCE,
        shuffle=False,
        row_filter=training,
    ) as feed:
        for batch in feed.epoch(0):
            if numeric:
                scales.add(_finite(joined(batch, numeric), numeric, batch))
            if label is not None:
                labels = joined(batch, (label,))
                label_scale.add(_finite(labels, (label,), batch))
            for name, categories in found.items():
                _add_categories(categories, batch[name], name)
    return Table(
        inputs=TabularInputs(
            numeric=numeric, categories={name: tuple(sorted(each)) for name, each in found.items()}
        ),
        scales=scales,
        label_scale=label_scale,
        is_plain=len(columns) == 1 and not names,
    )


def _check_kind(column: Column, *, is_category: bool) -> None:
    if is_category and (column.shape or column.kind not in ("number", "string") or "float" in column.dtype):
        held = f"arrays of {math.prod(column.shape)}" if column.shape else f"{column.kind} of {column.dtype}"
        remedy = (
            " Cast whole numbers to bigint; decimals are taken as doubles." if "float" in column.dtype else ""
        )
        raise DataError(
            f"Column {column.name!r} is to hold categories, and it holds {held}. Categories are strings or integers."
            f"{remedy}"
        )
    if not is_category and column.kind == "ragged":
        raise DataError(
            f"Column {column.name!r} has arrays that differ in length, or empty ones. Bring them to one length."
        )
    if not is_category and column.kind != "number":
        raise DataError(
            f"Column {column.name!r} holds {column.kind} values. Cast them to numbers, or to strings that are "
            "categories."
        )


def _finite(
    values: npt.NDArray[np.float32], names: tuple[str, ...], batch: dict[str, npt.NDArray[Any]]
) -> npt.NDArray[np.float32]:
    if np.isfinite(values).all():
        return values
    bad = [name for name in names if not np.isfinite(np.asarray(batch[name], np.float32)).all()]
    raise DataError(
        f"Columns of numbers hold NaN or infinity, or what is too large for float32: {', '.join(map(repr, bad))}. Fill "
        "them with pyspark.ml.feature.Imputer, or leave those rows out."
    )


def _add_categories(categories: set[Any], values: npt.NDArray[Any], name: str) -> None:
    categories.update(values.tolist() if values.dtype == object else np.unique(values).tolist())
    if len(categories) > MOST_CATEGORIES:
        raise DataError(
            f"Column {name!r} holds more than {MOST_CATEGORIES} different categories. Hash them to fewer, for instance "
            "with F.abs(F.hash(column)) % 1000."
        )
