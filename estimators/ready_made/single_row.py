"""What a model answers about one row, as models of Spark ML do it without a DataFrame. Runs anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import DataError
from sparkdl.training.predictor import Answer, Predictor, called

if TYPE_CHECKING:
    from sparkdl.training.saved_model import SavedModel


def answer_row(saved: SavedModel, value: Any, answer: Answer) -> Any:
    """Return the prediction for one row, or a vector of Spark ML with an entry for each class.

    Args:
        saved: the model.
        value: the features of the row: what the column holds, or where there are several a dict of that by name.
        answer: what is asked.

    Raises:
        DataError: if a column is missing or of another shape than in training.
    """
    from pyspark.ml.linalg import Vectors

    columns = saved.signature.inputs.columns
    if len(columns) > 1 and not isinstance(value, Mapping):
        names = ", ".join(column.name for column in columns)
        raise DataError(
            f"The model takes several columns: give a dict of {names}, not {type(value).__name__}."
        )
    # A row of Spark's image source is the value of a column, also as a dict.
    is_by_name = isinstance(value, Mapping) and (columns[0].kind != "image" or columns[0].name in value)
    given = value if is_by_name else {columns[0].name: value}
    kinds = {column.name: column.kind for column in columns}
    row = {name: _one(each, kinds.get(name)) for name, each in given.items()}
    (output,) = saved.signature.outputs
    (found,) = Predictor(saved, batch_size=1).answer(row, (answer,)).values()
    if answer == "prediction":
        return (
            called(found[answer], output)[0].item()
            if output.classes is None
            else called(found[answer], output)[0]
        )
    return Vectors.dense(found[answer][0])


def _one(value: Any, kind: str | None) -> Any:
    """An array of one row; strings, bytes and images stay objects."""
    if kind in ("string", "binary", "image"):
        row = np.empty(1, dtype=object)
        if kind == "binary":
            row[0] = bytes(value)  # which Spark gives as a bytearray
        elif kind == "image":
            row[0] = _pixels(value)
        else:
            row[0] = value
        return row
    return np.asarray(value.toArray() if hasattr(value, "toArray") else value)[None]


def _pixels(value: Any) -> npt.NDArray[np.uint8]:
    """An image as the feed gives it, of a row of Spark's image source or such an array."""
    if isinstance(value, np.ndarray):
        return value
    shape = value["height"], value["width"], value["nChannels"]
    return np.frombuffer(value["data"], np.uint8).reshape(shape)
