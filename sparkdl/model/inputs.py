"""Converts feature columns to the tensors that a model is called with.

Used on *ranks*, for predictions, and when a fit is tried. NumPy values become tensors of the dtype that the model and
the loss take; rows of different lengths are padded at their ends, to the longest row of a batch. Nested lists become an
array; lists of different lengths raise an error in every version of NumPy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.data import Column
from sparkdl.errors import DataError, ParamError, count_of, list_names
from sparkdl.foreign_errors import errors_as

# What torch's TransformerEncoder says of its own tensors in eval() mode, if it is given a padding mask.
warnings.filterwarnings(
    "ignore", message="The PyTorch API of nested tensors is in prototype stage", category=UserWarning
)


def to_tensor(array: npt.NDArray[np.generic] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``array`` as a tensor of ``dtype`` on ``device``; copies only if necessary."""
    if isinstance(array, Tensor):
        return array.to(device=device, dtype=dtype, non_blocking=True)
    # Arrow returns read-only arrays, and a tensor over one could be written to.
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = np.require(array, requirements=["C", "W"])
    return torch.from_numpy(array).to(device=device, dtype=dtype, non_blocking=True)


def to_features(array: npt.NDArray[np.generic] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return features as the model takes them: as :func:`to_tensor`, with scalars of a floating dtype as ``(N, 1)``.

    A layer such as Linear would interpret ``(N,)`` as one row of N features; an embedding takes integers as ``(N,)``.
    """
    tensor = to_tensor(array, dtype, device)
    return tensor.unsqueeze(1) if tensor.ndim == 1 and dtype.is_floating_point else tensor


def number_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which floats enter a module and its loss.

    That is the module's own ``number_dtype``, such as float64 for a module that standardizes numbers itself, or the
    dtype of its first floating-point parameter; float32 for a module without one.
    """
    dtype = getattr(module, "number_dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def candidate_dtypes(column_dtype: str, module: nn.Module) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a column may enter the model or the loss, the preferred one first.

    Floats become the module's :func:`number_dtype`. Integers stay integers (int64) if the model takes them, as an
    embedding does; otherwise they become that dtype, too.
    """
    floating = number_dtype(module)
    if np.issubdtype(np.dtype(column_dtype), np.floating):
        return (floating,)
    return (torch.int64, floating)


def own_dtype(array_dtype: str) -> torch.dtype | None:
    """Return torch's dtype of the name that NumPy has for it; None if torch has none."""
    dtype = getattr(torch, array_dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str) -> torch.dtype:
    """Return ``torch.float32`` for ``"float32"``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

DEFAULT_BATCH_SIZE = 1024
"""Number of rows per forward pass of a prediction; functions that prepare images or texts have a smaller one."""

GivenBy: TypeAlias = Literal["position", "name", "matrix"]
"""How a model is called with its inputs: by position, by keyword, or with all columns of numbers as one matrix."""

MATRIX = "features"
"""Name of the single input, of shape ``(rows, columns)``, that columns of numbers make together."""

PrepareFunction: TypeAlias = Callable[[dict[str, npt.NDArray[Any]]], Any]
"""A function that takes the feature columns of a batch by name, each with an item per row, and returns the model's
inputs: an array or a tensor, or a dict of them, each with an item per row. They keep their dtypes if the model takes
them."""


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """One input of a model.

    Attributes:
        name: name of the column, or of the result of the function that prepares features.
        dtype: torch dtype in which the input enters the model.
    """

    name: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Conversion of feature columns to the inputs of a model.

    Attributes:
        columns: feature columns, in the order in which they were given.
        inputs: inputs of the model, in the order in which it is called with them.
        given_by: how the model is called with the inputs; for ``"matrix"``, :data:`MATRIX` is the only input.
        padding_value: value that pads shorter arrays to the longest of a batch; None if all arrays have one
            length.
        prepare: the user's function that makes inputs of columns; None if there is none.
    """

    columns: tuple[Column, ...]
    inputs: tuple[ModelInput, ...] = ()
    given_by: GivenBy = "position"
    padding_value: float | None = None
    prepare: PrepareFunction | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the feature columns."""
        return tuple(column.name for column in self.columns)

    @property
    def take_nulls(self) -> bool:
        """Whether the model predicts rows with nulls."""
        return any(column.takes_nulls for column in self.columns)

    @property
    def rows_at_once(self) -> int:
        """Number of rows per forward pass, unless the user chooses another: what the prepare function says."""
        return int(getattr(self.prepare, "rows_at_once", DEFAULT_BATCH_SIZE))

    @property
    def are_numbers(self) -> bool:
        """Whether the model's inputs are the feature columns unchanged, each with one number per row."""
        return self.prepare is None and self.come_as_numbers

    @property
    def come_as_numbers(self) -> bool:
        """Whether every feature column has one number per row."""
        return all(column.kind == "number" and not column.shape for column in self.columns)

    def with_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> ModelInputs:
        """Return a copy with these inputs: ``dtypes`` has the dtype in which each enters the model, by its name."""
        inputs = tuple(ModelInput(name=name, dtype=dtype_name(dtype)) for name, dtype in dtypes.items())
        return replace(self, inputs=inputs)

    def prepare_batch(self, batch: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Return a batch's inputs by name as arrays of numbers.

        Args:
            batch: the feature columns by name, or their matrix under :data:`MATRIX` if the model is called with it.

        Raises:
            DataError: if a column is missing, has rows of another shape, or holds values that are not numbers; or the
                user's function fails on the rows.
            ParamError: if the user's function returns something that is not an input.
        """
        if self.given_by == "matrix" and MATRIX in batch and batch[MATRIX].ndim == 2:
            return {MATRIX: batch[MATRIX]}
        columns = {column.name: _check_column(batch, column) for column in self.columns}
        if self.given_by == "matrix":
            return {MATRIX: np.stack(list(columns.values()), axis=1)}
        if self.prepare is None:
            return {name: self._as_numbers(name, values) for name, values in columns.items()}
        num_rows = len(next(iter(columns.values())))
        # A DataError of a ready-made estimator names the row and what is wrong with it.
        with errors_as(
            DataError, f"Param prepareFeatures failed on {count_of(num_rows, 'row')} of {list_names(columns)}"
        ):
            made = self.prepare(dict(columns))
        if not isinstance(made, Mapping):
            made = {self.columns[0].name: made}
        return {str(name): self._make_input(str(name), values, num_rows) for name, values in made.items()}

    def example_batches(self, rows: Arrays) -> tuple[dict[str, Tensor], ...]:
        """Return the inputs that example rows make together, and those of each row alone if they differ in shape.

        Args:
            rows: feature columns by name, one row or more.
        """
        num_rows = len(next(iter(rows.values())))
        together, *alone = (
            self.tensors(
                self.prepare_batch({name: values[list(indices)] for name, values in rows.items()}),
                torch.device("cpu"),
            )
            for indices in (range(num_rows), *([index] for index in range(num_rows)))
        )
        is_padded = any(
            one[name].shape[1:] != tensor.shape[1:] for one in alone for name, tensor in together.items()
        )
        return (together, *alone) if is_padded else (together,)

    def apply(self, module: nn.Module, arrays: Mapping[str, Any], device: torch.device) -> Any:
        """Call a module with prepared inputs, arrays or tensors, and return its output."""
        return self.call(module, self.tensors(arrays, device))

    def tensors(self, arrays: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return prepared inputs, arrays or tensors, as the tensors that a module takes.

        Raises:
            DataError: if the module takes whole numbers, and an array holds others.
        """
        dtypes = {entry.name: find_dtype(entry.dtype) for entry in self.inputs}
        for name, dtype in dtypes.items():
            _check_holds(dtype, arrays[name], name)
        return {name: to_features(arrays[name], dtype, device) for name, dtype in dtypes.items()}

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> Any:
        """Call a module with its inputs, and return its output."""
        return module(**tensors) if self.given_by == "name" else module(*tensors.values())

    def _make_input(self, name: str, values: Any, num_rows: int) -> npt.NDArray[Any]:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        if array.ndim == 0 or len(array) != num_rows:
            raise ParamError(
                f"Param prepareFeatures returned {name!r} of shape {array.shape} for {count_of(num_rows, 'row')}. "
                "Return an array or a tensor with an item per row."
            )
        return self._as_numbers(name, array)

    def _as_numbers(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if values.dtype != object:
            return values
        return pad_rows(values, name=name, value=self.padding_value)


def _check_holds(dtype: torch.dtype, array: npt.NDArray[Any] | Tensor, name: str) -> None:
    """Check that whole numbers of a dtype hold those of an array, which torch would cut and wrap without an error."""
    if dtype.is_floating_point or dtype.is_complex or isinstance(array, Tensor):
        return
    target = np.dtype(dtype_name(dtype))
    if np.can_cast(array.dtype, target) or array.dtype.kind not in "biuf":
        return
    with np.errstate(invalid="ignore"):
        is_lost = array.astype(target) != array
    if is_lost.any():
        raise DataError(
            f"{name!r} holds {array[is_lost].tolist()[0]!r}, and the model takes it as {dtype_name(dtype)}, which has "
            "no such value. Bring it to the type that it had in the training."
        )


def _check_column(batch: Arrays, column: Column) -> npt.NDArray[Any]:
    if column.name not in batch:
        raise DataError(f"There is no column {column.name!r}. The columns are: {list_names(batch)}.")
    values = batch[column.name]
    if column.kind != "ragged" and values.shape[1:] != column.shape:
        raise DataError(
            f"Column {column.name!r} has rows of shape {values.shape[1:]}, and the model was trained on {column.shape}."
        )
    return values


def rectangular_array(value: Any) -> npt.NDArray[Any]:
    """Return a value, or nested lists or arrays of equal lengths, as an array.

    Raises:
        ValueError: if lists differ in length; NumPy before 1.24 would make an array of lists of them.
    """
    array = np.asarray(value)
    if array.dtype != object or not any(isinstance(item, list | tuple | np.ndarray) for item in array.flat):
        return array
    inner = [rectangular_array(item) for item in array]
    if len({item.shape for item in inner}) > 1:
        raise ValueError("lists of one level differ in length")
    return np.stack(inner)  # of arrays of arrays, as Arrow makes them of nested lists


def positions_in(documents: Tensor) -> Tensor:
    """Return the index of each position within its document, from 0, as if each document were predicted alone.

    Args:
        documents: document number of each position, ``(rows, positions)``; the positions of a document are contiguous.
    """
    counted = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return counted - torch.where(begins, counted, 0).cummax(dim=1).values


def pad_rows(rows: npt.NDArray[np.object_], *, name: str, value: float | None) -> npt.NDArray[Any]:
    """Return arrays of numbers as one array of shape ``(rows, *longest)``, in the dtype that holds them all.

    Args:
        rows: rows to pad, ``(rows,)``: arrays with the same number of dimensions, or lists of numbers nested equally
            deep.
        name: name of their column, used in error messages.
        value: padding value; None if all rows must have one shape.

    Raises:
        ParamError: if the dtype of the rows cannot hold the padding value.
        DataError: if a row holds values that are not numbers, or rows differ in shape and there is no padding value, or
            they differ in the number of dimensions.
    """
    arrays = [_numbers_of_row(row, name) for row in rows]
    if not arrays:
        return np.empty((0, 0))
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1:
        return np.stack(arrays)
    depths = {len(shape) for shape in shapes}
    if value is None or len(depths) > 1:
        some = sorted(shapes)[:: max(1, len(shapes) - 1)][:2]
        raise DataError(
            f"Rows of {name!r} differ in shape, such as {' and '.join(map(str, some))}. "
            + ("Set paddingValue to fill up shorter ones." if len(depths) == 1 else "Make them alike.")
        )
    longest = tuple(np.max(np.array(sorted(shapes)), axis=0))
    dtype = np.result_type(*{array.dtype for array in arrays})
    _check_padding_value(value, dtype, name)
    padded = np.full((len(arrays), *longest), value, dtype)
    for place, array in zip(padded, arrays, strict=True):
        place[tuple(slice(length) for length in array.shape)] = array
    return padded


def _check_padding_value(value: float, dtype: np.dtype[Any], name: str) -> None:
    if dtype.kind == "f":
        return
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if math.isnan(value) or value != int(value) or not least <= value <= most:
        raise ParamError(
            f"Param paddingValue is {value:g}, and {name!r} holds {dtype}. Choose a value of that type."
        )


def _numbers_of_row(row: Any, name: str) -> npt.NDArray[Any]:
    array = np.asarray(row)
    if array.dtype == object and array.ndim == 1 and all(isinstance(item, np.ndarray) for item in array):
        # Arrays of inner arrays that differ in length are not padded.
        raise DataError(
            f"Column {name!r} has arrays inside arrays that differ in length. Bring them to one shape with "
            "prepareFeatures."
        )
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"Column {name!r} holds values that are not numbers, such as {row!r:.80}. Convert them with "
            "prepareFeatures."
        )
    return array
