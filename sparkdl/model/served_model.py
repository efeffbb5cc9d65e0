"""Predicts the rows of a pandas DataFrame with a saved model: the model that MLflow's pyfunc calls.

Runs wherever a model is served; imports neither mlflow nor Spark nor Arrow. :mod:`sparkdl.mlflow.pyfunc`, which MLflow
loads, wraps it. :mod:`~sparkdl.model.served_columns` converts the columns of a request.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from sparkdl.errors import DataError, ParamError, list_names
from sparkdl.model.decisions import has_probabilities, to_label_values
from sparkdl.model.predictor import Answer, Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.served_columns import to_column_dtype

if TYPE_CHECKING:
    from sparkdl.model.signature import ModelOutput, ModelSignature


def default_params(signature: ModelSignature) -> dict[str, Any]:
    """Return the params of inference with their defaults.

    They are the number of rows per forward pass, the device of the module, whether missing values are passed to the
    module as NaN, and the column to return as an array, or an empty string for all columns.
    """
    return {"batch_size": signature.batch_size, "device": "cpu", "allow_nan": False, "output": ""}


def answer_names(outputs: tuple[ModelOutput, ...]) -> list[tuple[str, str | None]]:
    """Return for each output the names of its prediction column and of its probability column, or None without one.

    They are ``prediction`` and ``probability`` for a single output; for several outputs ``<label>`` and
    ``<label>_probability``.
    """
    names = [("prediction", "probability")]
    if len(outputs) > 1:
        names = [(output.name, f"{output.name}_probability") for output in outputs]
    return [
        (prediction, probability if has_probabilities(output) else None)
        for (prediction, probability), output in zip(names, outputs, strict=True)
    ]


class PyfuncModel:
    """The model that MLflow calls: ``predict`` takes a DataFrame with the feature columns. Thread-safe.

    Args:
        saved: the model.
        output: value of the param ``output`` where a call does not give one.

    Attributes:
        module: the module, on CPU.
    """

    def __init__(self, saved: SavedModel, *, output: str = "") -> None:
        self.module, self._output = saved.module, output
        self._on_device = {"cpu": saved}
        self._lock = threading.Lock()

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the predictions of every row.

        Args:
            model_input: a pandas DataFrame (or a dict of columns) with the feature columns: numbers, strings, bytes, or
                one list or array per row. A NumPy array of shape ``(rows, *shape)`` is also accepted if the model has
                one feature column and one output.
            params: ``batch_size``, number of rows per forward pass, default
                ``predictionBatchSize`` of the model; ``device``, device on which the
                module runs, ``"cpu"`` (default), ``"cuda"`` or ``"cuda:1"``; ``allow_nan``, whether missing values in
                columns of floating-point numbers are passed to the module as NaN, default False; ``output``, name of
                the column to return, default all columns.

        Returns:
            A DataFrame with the index of the input. Its column ``prediction`` holds the label column's value of the
            class, or else a number or a list of numbers; ``probability``, if the output has probabilities, a list with
            an entry per class, in ascending order or in that of the Param ``labels``. With several label columns, the
            columns are ``<label>`` and ``<label>_probability``. With ``output`` a NumPy array of the values of one
            column, shape ``(rows,)`` or ``(rows, *shape)``. For a NumPy array, a NumPy array of the predictions.

        Raises:
            DataError: if a feature column is missing, or holds nulls or NaN, rows of another length, or values that the
                dtype of the training cannot hold; or if a prediction would be NaN or infinite.
            ParamError: if a param has an invalid value.
        """
        settings = {**default_params(self._on_device["cpu"].signature), **(params or {})}
        predictor, allow_nan = self._predictor(settings), settings["allow_nan"]
        if not isinstance(allow_nan, bool | np.bool_):
            raise ParamError(f"The param allow_nan is {allow_nan!r}. Give True or False.")
        columns, outputs = predictor.signature.inputs.columns, predictor.signature.outputs
        names = answer_names(outputs)
        output_name = settings["output"] or self._output
        all_names = [name for pair in names for name in pair if name is not None]
        if output_name and output_name not in all_names:
            raise ParamError(f"The param output is {output_name!r}. Give one of: {list_names(all_names)}.")
        if isinstance(model_input, np.ndarray):
            return self._predict_array(model_input, predictor, bool(allow_nan), output_name)
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        for column in columns:
            if column.name not in frame.columns:
                raise DataError(
                    f"There is no column {column.name!r}. The columns are: {list_names(map(str, frame.columns))}."
                )
        wanted: dict[str, tuple[Answer, ...]] = {
            output.name: ("prediction", "probability") if probability else ("prediction",)
            for output, (_, probability) in zip(outputs, names, strict=True)
        }
        rows = {
            column.name: to_column_dtype(frame[column.name], column, allow_nan=bool(allow_nan))
            for column in columns
        }
        answer = predictor.answer(rows, wanted)
        for output in outputs:
            _check_finite(answer[output.name]["prediction"], output)
        answers: dict[str, npt.NDArray[Any]] = {}
        for output, (prediction, probability) in zip(outputs, names, strict=True):
            answers[prediction] = to_label_values(answer[output.name]["prediction"], output)
            if probability is not None:
                answers[probability] = answer[output.name]["probability"]
        if output_name:
            return answers[output_name]
        return pd.DataFrame({name: _per_row(values) for name, values in answers.items()}, index=frame.index)

    def _predictor(self, params: Mapping[str, Any]) -> Predictor:
        batch_size = params["batch_size"]
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ParamError(
                f"The param batch_size is {batch_size!r}. Give a whole number of rows, 1 or more."
            )
        name = str(params["device"])
        with self._lock:
            if name not in self._on_device:
                # A copy, as other threads may be using the module on its device.
                module = copy.deepcopy(self.module).to(_device(name))
                self._on_device[name] = SavedModel(module, self._on_device["cpu"].signature)
            return Predictor(self._on_device[name], batch_size=int(batch_size), device=name)

    def _predict_array(
        self, rows: npt.NDArray[Any], predictor: Predictor, allow_nan: bool, output_name: str
    ) -> npt.NDArray[Any]:
        columns, outputs = predictor.signature.inputs.columns, predictor.signature.outputs
        for what, fields in (("takes", columns), ("gives", outputs)):
            if len(fields) > 1:
                raise DataError(
                    f"The model {what} {len(fields)} columns, {list_names(field.name for field in fields)}: give a "
                    f"DataFrame with {list_names(column.name for column in columns)} instead of an array."
                )
        (column,) = columns
        wanted: tuple[Answer, ...] = ("prediction",)
        if output_name == "probability":
            wanted = ("prediction", "probability")
        answers = predictor.answer({column.name: to_column_dtype(rows, column, allow_nan=allow_nan)}, wanted)
        (output,) = outputs
        predictions = answers[output.name]["prediction"]
        _check_finite(predictions, output)
        if output_name == "probability":
            return answers[output.name]["probability"]
        return to_label_values(predictions, output)


def _check_finite(predictions: npt.NDArray[np.float64], output: ModelOutput) -> None:
    """Check that JSON, which has neither NaN nor infinity, can hold the predictions.

    Raises:
        DataError: if it cannot.
    """
    if output.is_sequence or np.isfinite(predictions).all():
        return
    rows = np.asarray(~np.isfinite(predictions).all(axis=tuple(range(1, predictions.ndim))))
    raise DataError(
        f"The model's output for {output.name!r} is infinite in {int(rows.sum())} of {len(rows)} rows, the first of "
        f"them row {int(np.argmax(rows))}. Look for features that are far from those that it was trained on."
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParamError(f"The param device is {name!r}. Give 'cpu', 'cuda' or 'cuda:1'.") from error
    number_of = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= number_of:
        raise ParamError(
            f"The param device is {name!r}, and this process sees {torch.cuda.device_count()} CUDA devices. "
            "Give one that is here, or 'cpu'."
        )
    return device


def _per_row(predictions: npt.NDArray[Any]) -> Any:
    if predictions.ndim == 1:
        return predictions
    return list(predictions.reshape(len(predictions), math.prod(predictions.shape[1:])))
