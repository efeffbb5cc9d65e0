"""What a model answers about one row, as models of Spark ML do it without a DataFrame. Runs anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl.data.dataset.arrow import IMAGE_FIELDS
from sparkdl.data.dataset.dataset import missing_column_error
from sparkdl.errors import DataError
from sparkdl.model.inputs import rectangular_array
from sparkdl.model.predictor import Answer, Predictor, called

if TYPE_CHECKING:
    from sparkdl.data import Column
    from sparkdl.model.saved_model import SavedModel

_IMAGE = (
    f"a row of Spark's image source ({', '.join(IMAGE_FIELDS)}), or an array of height, width and channels"
)


def answer_row(saved: SavedModel, value: Any, answer: Answer) -> Any:
    """Return the prediction for one row, or a vector of Spark ML with an entry for each class.

    Args:
        saved: the model.
        value: the features of the row: what the column holds, or by the names of the columns a dict or a Row of Spark,
            which may have others beside them.
        answer: what is asked.

    Raises:
        DataError: if a column is missing, null, of another shape than in training, or holds what it does not take.
    """
    from pyspark.ml.linalg import Vectors

    columns = saved.signature.inputs.columns
    given = _by_name(value, columns)
    for column in columns:
        if column.name not in given:
            raise missing_column_error(column.name, list(given))
    row = {column.name: _one(given[column.name], column) for column in columns}
    (output,) = saved.signature.outputs
    (found,) = Predictor(saved, batch_size=1).answer(row, (answer,)).values()
    if answer == "prediction":
        return (
            called(found[answer], output)[0].item()
            if output.classes is None
            else called(found[answer], output)[0]
        )
    return Vectors.dense(found[answer][0])


def _by_name(value: Any, columns: tuple[Column, ...]) -> Mapping[str, Any]:
    """The features of a row by the names of their columns."""
    from pyspark.sql import Row

    named = value.asDict() if isinstance(value, Row) and hasattr(value, "__fields__") else value
    if len(columns) > 1:
        if not isinstance(named, Mapping):
            names = ", ".join(column.name for column in columns)
            raise DataError(
                f"The model takes several columns: give a dict of {names}, or a Row that has them, not "
                f"{type(value).__name__}."
            )
        return named
    (column,) = columns
    # A row of Spark's image source is the value of a column, also as a dict.
    if isinstance(named, Mapping) and (column.kind != "image" or column.name in named):
        return named
    return {column.name: value}


def _one(value: Any, column: Column) -> npt.NDArray[Any]:
    """An array of one row; strings, bytes and images stay objects."""
    if value is None:
        raise DataError(
            f"Column {column.name!r} is null in this row, of which nothing can be told; transform gives null."
        )
    if column.kind in ("string", "binary", "image") and not column.shape:
        row = np.empty(1, dtype=object)
        row[0] = _object(value, column)
        return row
    return _numbers(value, column)[None]


def _object(value: Any, column: Column) -> Any:
    if column.kind == "image":
        return _pixels(value, column)
    if column.kind == "string":
        if not isinstance(value, str):
            raise _not_taken(value, column, "a string")
        return value
    if not isinstance(value, bytes | bytearray | memoryview):
        remedy = " Give what is in the file, not its path." if isinstance(value, str) else ""
        raise _not_taken(value, column, "bytes", remedy)
    return bytes(value)  # which Spark gives as a bytearray


def _numbers(value: Any, column: Column) -> npt.NDArray[Any]:
    element, depth = (column.element[0], 1) if column.kind == "ragged" else (column.kind, len(column.shape))
    wanted = f"arrays of {element}s" if depth else f"a {element}"
    try:
        row = rectangular_array(value.toArray() if hasattr(value, "toArray") else value)
    except ValueError as error:  # arrays inside arrays that differ in length
        raise _not_taken(value, column, wanted, f" {error}") from error
    if (
        element == "number"
        and row.dtype == object
        and all(isinstance(each, Decimal | Real) for each in row.flat)
    ):
        row = row.astype(np.float64)
    if element == "number" and row.dtype.kind not in "biuf":
        raise _not_taken(value, column, wanted)
    return row


def _pixels(value: Any, column: Column) -> npt.NDArray[np.uint8]:
    """An image as the feed gives it, of a row of Spark's image source or such an array."""
    if isinstance(value, np.ndarray):
        return value
    try:
        shape = value["height"], value["width"], value["nChannels"]
        return np.frombuffer(value["data"], np.uint8).reshape(shape)
    except (TypeError, KeyError, ValueError) as error:  # a Row says ValueError of a field that it has not
        is_row = isinstance(value, Mapping) or hasattr(value, "__fields__")
        reason = f" {type(error).__name__}: {error}" if is_row else ""
        raise _not_taken(value, column, _IMAGE, reason) from error


def _not_taken(value: Any, column: Column, wanted: str, more: str = "") -> DataError:
    return DataError(
        f"Column {column.name!r} takes {wanted}, as the model was trained on, not {type(value).__name__}.{more}"
    )
