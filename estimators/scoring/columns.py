"""The columns that ``transform`` adds: their content, their types, and their Arrow arrays.

Defined on the *driver*, computed in Spark's Python workers on the *executors*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.spark.columns import quote
from sparkdl.errors import ParamError
from sparkdl.model.decisions import has_probabilities, has_scores, to_label_values

if TYPE_CHECKING:
    from pyspark.sql import Column

    from sparkdl.model.predictor import Answer
    from sparkdl.model.signature import ModelOutput

PREDICTION_TYPES = ("auto", "double", "long", "array", "vector")


@dataclass(frozen=True, kw_only=True)
class ScoredColumn:
    """A column that a model adds.

    Attributes:
        name: name of the column.
        answer: content of the column: predictions, probabilities or class scores.
        type: type of predictions, one of :data:`PREDICTION_TYPES`; scores and probabilities are always vectors.
    """

    name: str
    answer: Answer = "prediction"
    type: str = "auto"

    @property
    def param(self) -> str:
        """Name of the Param that adds the column."""
        return f"{self.answer}Col"


PREDICTION = (ScoredColumn(name="prediction"),)
"""Only the column of predictions."""


def outputs_for(column: ScoredColumn, outputs: Sequence[ModelOutput]) -> tuple[ModelOutput, ...]:
    """Return those outputs of a model whose answer a column can hold. Only classes have scores and probabilities."""
    has_answer = {"probability": has_probabilities, "rawPrediction": has_scores}.get(column.answer)
    return tuple(output for output in outputs if has_answer is None or has_answer(output))


def check_scored_columns(columns: Sequence[ScoredColumn], outputs: Sequence[ModelOutput]) -> None:
    """Check that the columns can be computed from the outputs of a model.

    Raises:
        ParamError: if a column cannot; the message names its Param.
    """
    for column in columns:
        if column.answer == "prediction":
            for output in outputs:
                _check_type(column, output)
        elif not outputs_for(column, outputs):
            predicted = ", ".join(
                f"the output for label column {output.name!r} predicts {_describe_output(output)}"
                for output in outputs
            )
            raise ParamError(
                f"Param {column.param} is {column.name!r}, and {predicted}. Train with CrossEntropyLoss, NLLLoss, "
                f"BCEWithLogitsLoss or BCELoss on one label per row, or leave {column.param} out."
            )


def _check_type(column: ScoredColumn, output: ModelOutput) -> None:
    of_label = f"the output for label column {output.name!r}"
    if output.is_sequence and column.type != "auto":
        what = "a text" if output.kind == "text" else "an array of tokens"
        raise ParamError(
            f"Param predictionType is {column.type!r}, and {of_label} is {what}. Leave it at 'auto'."
        )
    if column.type in ("double", "long") and output.shape:
        raise ParamError(
            f"Param predictionType is {column.type!r}, and {of_label} has shape {output.shape} per row. Leave it at "
            "'auto', or make it 'array' or 'vector'."
        )
    if column.type == "long" and output.kind == "value":
        raise ParamError(
            f"Param predictionType is 'long', and {of_label} is a number with a fraction. Leave it at 'auto', and "
            "round the column as you like."
        )


def _describe_output(output: ModelOutput) -> str:
    if output.kind == "value" or output.is_sequence:
        return "no classes"
    return (
        f"classes of shape {output.shape} per row" if output.shape else "margins, which are not probabilities"
    )


def result_type(columns: Sequence[ScoredColumn], outputs: Sequence[ModelOutput]) -> str:
    """Return the Spark type of the result of :func:`to_arrow`: of one column, or a struct with a field per column.

    A column has the type of the model's output; if the model has several outputs, it is a struct with a field for each
    output that the column contains. Vectors are returned as arrays of doubles, which :func:`of_spark` converts.
    """
    types = [
        _struct(
            [(output.name, _type_of(column, output)) for output in outputs_for(column, outputs)], len(outputs)
        )
        for column in columns
    ]
    fields = [(column.answer, type_) for column, type_ in zip(columns, types, strict=True)]
    return _struct(fields, len(columns))


def _struct(fields: Sequence[tuple[str, str]], most: int) -> str:
    """Return the struct type of the fields, or the type of the only field if ``most`` is 1."""
    if most == 1:
        return fields[0][1]
    return f"struct<{', '.join(f'{quote(name)}: {kind}' for name, kind in fields)}>"


def _type_of(column: ScoredColumn, output: ModelOutput) -> str:
    if column.answer != "prediction" or column.type == "vector":
        return "array<double>"
    if column.type in ("double", "long"):
        return {"double": "double", "long": "bigint"}[column.type]
    if output.is_sequence:
        return "string" if output.kind == "text" else "array<bigint>"
    element = value_type(output)
    return f"array<{element}>" if output.shape or column.type == "array" else element


def value_type(output: ModelOutput) -> str:
    """Return the name that Spark and MLflow have for the type of a class or a number that an output predicts."""
    return {str: "string", bool: "boolean"}.get(type((output.classes or (0.0,))[0]), "double")


def to_arrow(
    columns: Sequence[ScoredColumn],
    outputs: Sequence[ModelOutput],
    answers: Mapping[str, Mapping[Answer, npt.NDArray[np.float64]]],
    absent: npt.NDArray[np.bool_] | None,
) -> pa.Array:
    """Return the columns of one batch, of the type :func:`result_type`.

    Args:
        columns: columns to add.
        outputs: outputs of the model.
        answers: answers for the rows without a null, by the name of the output and the content of the column.
        absent: boolean mask of the rows that get null in every column; None if there are none.
    """
    mask = None if absent is None else pa.array(absent)

    def together(arrays: Mapping[str, pa.Array], most: int) -> pa.Array:
        if most == 1:
            return next(iter(arrays.values()))
        return pa.StructArray.from_arrays(list(arrays.values()), list(arrays), mask=mask)

    found: dict[str, pa.Array] = {
        column.answer: together(
            {
                output.name: _values(column, output, answers[output.name][column.answer], absent)
                for output in outputs_for(column, outputs)
            },
            len(outputs),
        )
        for column in columns
    }
    return together(found, len(columns))


def _values(
    column: ScoredColumn,
    output: ModelOutput,
    answers: npt.NDArray[np.float64],
    absent: npt.NDArray[np.bool_] | None,
) -> pa.Array:
    if column.answer != "prediction":
        return _spread(answers, absent, is_list=True)
    if output.kind == "tokens":
        return _spread_tokens(answers, absent)
    if column.type in ("auto", "array"):
        is_list = column.type == "array" or bool(output.shape)
        return _spread(to_label_values(answers, output), absent, is_list=is_list)
    numbers = _as_numbers(answers, output)
    if column.type == "long":
        return _spread(numbers.astype(np.int64), absent, is_list=False)
    return _spread(numbers, absent, is_list=column.type == "vector")


def _as_numbers(predictions: npt.NDArray[np.float64], output: ModelOutput) -> npt.NDArray[np.float64]:
    """Return the numbers of the classes if labels are strings, else the labels as numbers."""
    if output.classes is None or isinstance(output.classes[0], str):
        return predictions
    return to_label_values(predictions, output).astype(np.float64)


def _spread(values: npt.NDArray[Any], absent: npt.NDArray[np.bool_] | None, *, is_list: bool) -> pa.Array:
    """Return values as an Arrow array, with null in absent rows."""
    num_rows = len(values) if absent is None else len(absent)
    if is_list:
        width = math.prod(values.shape[1:])
        widths = np.full(num_rows, width) if absent is None else ~absent * width
        offsets = pa.array(np.concatenate([[0], np.cumsum(widths)]).astype(np.int32))
        mask = None if absent is None else pa.array(absent)
        return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)), mask=mask)
    if absent is None:
        return pa.array(values)
    spread = np.zeros(num_rows, values.dtype)
    spread[~absent] = values
    return pa.array(spread, mask=absent)


def _spread_tokens(values: npt.NDArray[Any], absent: npt.NDArray[np.bool_] | None) -> pa.Array:
    """Return token arrays as an Arrow array of lists, with null in absent rows."""
    rows = np.full(len(values) if absent is None else len(absent), None, object)
    rows[slice(None) if absent is None else ~absent] = values
    return pa.array(list(rows), pa.list_(pa.int64()))


def of_spark(column: ScoredColumn, outputs: Sequence[ModelOutput], scored: Column) -> Column:
    """Return the Spark column from the result of :func:`to_arrow`, with arrays converted to vectors where needed."""
    if column.answer == "prediction" and column.type != "vector":
        return scored
    if len(outputs) == 1:
        return _vector(scored)
    from pyspark.sql import functions as F

    names = [output.name for output in outputs_for(column, outputs)]
    fields = F.struct(*[_vector(scored.getField(name)).alias(name) for name in names])
    return F.when(scored.isNotNull(), fields)


def _vector(array: Column) -> Column:
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    return F.when(array.isNotNull(), array_to_vector(array))  # array_to_vector fails on null
