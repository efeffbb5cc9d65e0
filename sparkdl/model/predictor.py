"""Applies a module to columns of NumPy values and derives class scores, probabilities and predictions.

Runs anywhere; needs torch and NumPy only. :mod:`sparkdl.model.decisions` turns outputs into predictions.

An output that is NaN is not a prediction: ``argmax`` would make a class of it. Rows with such an output raise an
error that names the columns with NaN or infinity in them; :meth:`Predictor.answer_complete` leaves out such rows if
they have NaN among their features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdl.errors import DataError, SparkdlError, list_names
from sparkdl.model.decisions import (
    BINARY,
    CLASSES,
    class_probabilities,
    class_scores,
    decide,
    decide_by_thresholds,
    to_label_values,
)
from sparkdl.model.heads import NO_LABEL, first_output, output_of_each
from sparkdl.model.inputs import MATRIX, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sparkdl.model.inputs import Arrays
    from sparkdl.model.saved_model import SavedModel
    from sparkdl.model.signature import ModelOutput


_ROWS_AT_ONCE = 1 << 14
"""Approximate number of rows of number columns that become tensors together: a served frame may have any length."""

Answer: TypeAlias = Literal["prediction", "probability", "rawPrediction"]
"""A result that a model can compute for a row, by its name in Spark ML."""


class Predictor:
    """Computes predictions with a trained module.

    Args:
        model: the module and its signature; the module is moved to ``device`` and put in ``eval()`` mode.
        batch_size: number of rows per forward pass; None for that of the signature.
        device: device on which the module runs.
    """

    def __init__(
        self, model: SavedModel, *, batch_size: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.signature = model.signature
        chosen, most = batch_size or model.signature.batch_size, model.signature.max_batch_size
        self._batch_size = chosen if most is None else min(chosen, most)
        self._device = torch.device(device)
        self._module = model.module.to(self._device).eval()

    def predict(self, columns: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Return one prediction per row for each output, by the name of the output.

        Predictions are float64 of shape ``(rows, *output.shape)``, or the label column's values of the classes, or
        texts or arrays of tokens.

        Args:
            columns: feature columns by name, ``(rows, *column.shape)``, or their matrix if the model takes one.

        Raises:
            DataError: if a column is missing, its rows have another shape than the model was trained on, it holds
                values that cannot be made numbers, or the module fails on the rows or its output for one is NaN.
        """
        answers = self.answer(columns, ("prediction",))
        return {
            output.name: to_label_values(answers[output.name]["prediction"], output)
            for output in self.signature.outputs
        }

    def answer(
        self, columns: Arrays, wanted: Sequence[Answer] | Mapping[str, Sequence[Answer]]
    ) -> dict[str, dict[Answer, npt.NDArray[np.float64]]]:
        """Return the wanted answers from one pass of the module, by the name of each output and by answer.

        Each answer is an array with an item per row. ``"prediction"`` has the shape ``(rows, *output.shape)``, with
        classes as their numbers. ``"probability"`` and ``"rawPrediction"`` have the shape ``(rows, classes)``, see
        :mod:`sparkdl.model.predictor`.

        Args:
            columns: feature columns as for :meth:`predict`.
            wanted: answers to compute for every output, or the answers for each output by its name; an output must
                have the answers that are wanted of it.

        Raises:
            DataError: as :meth:`predict` does.
        """
        answer, is_nan = self._answer(columns, wanted)
        if is_nan.any():
            raise self._nan_answers(columns, is_nan)
        return answer

    def answer_complete(
        self, columns: Arrays, wanted: Sequence[Answer] | Mapping[str, Sequence[Answer]]
    ) -> tuple[dict[str, dict[Answer, npt.NDArray[np.float64]]], npt.NDArray[np.bool_] | None]:
        """Return the same as :meth:`answer`, without rows whose output is NaN and that have NaN among their features.

        Args:
            columns: feature columns as for :meth:`predict`.
            wanted: answers as for :meth:`answer`.

        Returns:
            The answers for the remaining rows, and a mask of the rows that are left out, or None if none is.

        Raises:
            DataError: as :meth:`predict` does, but not for rows that are left out.
        """
        answers_of, is_nan = self._answer(columns, wanted)
        if not is_nan.any():
            return answers_of, None
        has_nan = np.logical_or.reduce(list(self._rows_with(np.isnan, columns).values()))
        if (is_nan & ~has_nan).any():
            raise self._nan_answers(columns, is_nan & ~has_nan)
        kept = {
            name: {answer: values[~is_nan] for answer, values in answers.items()}
            for name, answers in answers_of.items()
        }
        return kept, is_nan

    def _answer(
        self, columns: Arrays, wanted: Sequence[Answer] | Mapping[str, Sequence[Answer]]
    ) -> tuple[dict[str, dict[Answer, npt.NDArray[np.float64]]], npt.NDArray[np.bool_]]:
        """The answers, and a mask of the rows for which an output is NaN."""
        outputs = self.signature.outputs
        of_each = wanted if isinstance(wanted, Mapping) else {output.name: wanted for output in outputs}
        parts_of: dict[str, dict[Answer, list[npt.NDArray[Any]]]] = {
            output.name: {answer: [] for answer in of_each[output.name]} for output in outputs
        }
        is_nan = [np.zeros(0, bool)]
        with torch.inference_mode():
            for tensors in self._batches(columns):
                made = self._call(tensors)
                names = list(parts_of)
                returned = first_output(made) if names == [NO_LABEL] else output_of_each(made, names)
                without = [_is_nan(returned[output.name], output) for output in outputs]
                is_nan.append(torch.stack(without).any(dim=0).cpu().numpy())
                for output in outputs:
                    for answer, parts in parts_of[output.name].items():
                        parts.append(_answer(answer, returned[output.name], output))
        answers = {
            output.name: {
                answer: _together(parts, answer, output) for answer, parts in parts_of[output.name].items()
            }
            for output in outputs
        }
        return answers, np.concatenate(is_nan)

    def _rows_with(
        self, condition: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]], columns: Arrays
    ) -> dict[str, npt.NDArray[np.bool_]]:
        """For each feature column, by its name, a mask of the rows with a number for which a condition holds."""
        inputs = self.signature.inputs
        if inputs.given_by == "matrix" and MATRIX in columns and columns[MATRIX].ndim == 2:
            return dict(zip(inputs.names, condition(columns[MATRIX]).T, strict=True))
        return {name: _rows_of(condition, columns[name]) for name in inputs.names}

    def _nan_answers(self, columns: Arrays, rows: npt.NDArray[np.bool_]) -> DataError:
        """Return the error that says for which rows the output is NaN, and whether they hold NaN or infinity."""
        count = int(rows.sum())
        found_rows = []
        for what, condition in (("NaN", np.isnan), ("infinity", np.isinf)):
            for name, has_value in self._rows_with(condition, columns).items():
                if (has_value & rows).any():
                    found_rows.append(f"column {name!r} holds {what} in {int((has_value & rows).sum())}")
        why = (
            f"Of these rows {list_names(found_rows)}. Fill those values, or leave the rows out."
            if found_rows
            else "Their features are finite numbers: either these are far from what the model was trained on, or its "
            "weights are of no use. Look at the losses of its fit."
        )
        return DataError(
            f"The model's output is NaN for {count} of {len(rows)} rows, the first of them row {int(np.argmax(rows))}, "
            f"and NaN is neither a class nor a number. {why}"
        )

    def _call(self, tensors: Mapping[str, Tensor]) -> Any:
        try:
            return self.signature.inputs.call(self._module, tensors)
        except (SparkdlError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            shown = list_names(f"{name} {_describe(tensor)}" for name, tensor in tensors.items())
            raise DataError(
                f"The model failed with {type(error).__name__}: {str(error).rstrip('.')}. It was given {shown}. "
                "Look for rows that are unlike those it was trained on."
            ) from error

    def _batches(self, columns: Arrays) -> Iterator[dict[str, Tensor]]:
        """Yield the module's inputs for each forward pass."""
        inputs, size = self.signature.inputs, self._batch_size
        num_rows = len(next(iter(columns.values())))
        # Many rows are converted at once and then split: with many columns, converting each column for every pass would
        # add much to the cost of the module.
        step = max(1, _ROWS_AT_ONCE // size) * size if inputs.are_numbers else size
        for start in range(0, num_rows, step):
            arrays = inputs.prepare_batch(
                {name: values[start : start + step] for name, values in columns.items()}
            )
            tensors = inputs.tensors(arrays, self._device)
            if not inputs.are_numbers:  # the results of a user's function may not be splittable by rows
                yield tensors
                continue
            for parts in zip(*(tensor.split(size) for tensor in tensors.values()), strict=True):
                yield dict(zip(tensors, parts, strict=True))


def _rows_of(
    condition: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]], values: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """A mask of a column's rows with a number for which a condition holds; ragged rows are arrays or lists of them."""
    if values.dtype.kind == "f":
        per_number = condition(values)
        return np.asarray(per_number.any(axis=tuple(range(1, values.ndim))))
    if values.dtype != object:
        return np.zeros(len(values), bool)
    return np.fromiter((_has_number(condition, row) for row in values), bool, len(values))


def _has_number(condition: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]], row: Any) -> bool:
    if isinstance(row, list):
        return any(_has_number(condition, inner) for inner in row)
    return isinstance(row, np.ndarray) and row.dtype.kind == "f" and bool(condition(row).any())


def _is_nan(outputs: Tensor, output: ModelOutput) -> Tensor:
    """A mask of the rows whose output is NaN, or gives probabilities that are NaN."""
    if output.is_sequence:
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)
    if output.kind == "class":
        # The softmax is NaN if a score is +infinity or all log-probabilities are -infinity.
        is_nan = ~outputs.amax(dim=1).isfinite()
    elif output.kind in CLASSES:
        is_nan = outputs.amax(dim=1).isnan()
    else:
        is_nan = outputs.isnan()
    return is_nan.reshape(-1, math.prod(output.shape)).any(dim=1)


def _describe(tensor: Tensor) -> str:
    text = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    # An index may be out of range. After such a failure on a GPU, no tensor on it can be read.
    if tensor.is_cpu and tensor.dtype in (torch.int32, torch.int64) and tensor.numel():
        text += f" from {int(tensor.min())} to {int(tensor.max())}"
    return text


def _sequences(outputs: Tensor, output: ModelOutput) -> npt.NDArray[Any]:
    """The rows of tokens that a module returned, or texts from rows of UTF-8 bytes; both are padded with -1."""
    rows: npt.NDArray[Any] = np.empty(len(outputs), object)
    for row, values in enumerate(outputs.cpu().numpy()):
        shown = values[values >= 0]
        rows[row] = (
            shown if output.kind == "tokens" else shown.astype(np.uint8).tobytes().decode("utf-8", "replace")
        )
    return rows


def _answer(answer: Answer, outputs: Tensor, output: ModelOutput) -> npt.NDArray[Any]:
    if output.is_sequence:
        return _sequences(outputs, output)
    if answer == "probability":
        values = class_probabilities(outputs, output.kind)
    elif answer == "rawPrediction":
        values = class_scores(outputs, output.kind)
    elif output.thresholds is not None:
        values = decide_by_thresholds(class_probabilities(outputs, output.kind), output.thresholds)
    else:
        values = decide(outputs, output.kind).reshape(-1, *output.shape)
    array: npt.NDArray[np.float64] = values.to("cpu", torch.float64).numpy()
    return array


def _together(
    parts: Sequence[npt.NDArray[Any]], answer: Answer, output: ModelOutput
) -> npt.NDArray[np.float64]:
    if len(parts) == 1:
        return parts[0]
    if parts:
        return np.concatenate(parts)
    num_classes = 2 if output.kind in BINARY else output.num_classes or 0
    return np.empty((0, *output.shape) if answer == "prediction" else (0, num_classes))
