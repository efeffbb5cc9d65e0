"""From feature columns to what a model is called with: on *ranks*, for predictions, and when a fit is tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdl.data import Column
from sparkdl.errors import DataError, ParamError
from sparkdl.training.columns import dtype_named, to_features
from sparkdl.training.padding import pad_rows

if TYPE_CHECKING:
    from torch import nn

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

GivenBy: TypeAlias = Literal["position", "name", "matrix"]
"""How a model is called with its inputs: one after the other, by keywords, or with numbers as one matrix."""

MATRIX = "features"
"""What the one input is called that columns of numbers make together, of shape ``(rows, columns)``."""

PrepareFunction: TypeAlias = Callable[[dict[str, npt.NDArray[Any]]], Any]
"""Takes feature columns of a batch by name, each with an item per row, and returns the model's inputs: an array or
tensor, or a dict of them, with a row for each."""


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """One thing that a model is called with.

    Attributes:
        name: of the column, or what the function that prepares features calls it.
        dtype: torch dtype in which it enters the model.
    """

    name: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """How feature columns become what a model is called with.

    Attributes:
        columns: the feature columns, in the order in which they were given.
        inputs: what the model is called with, in order.
        given_by: how the model is called with them; as one matrix, :data:`MATRIX` is the only input.
        padding_value: with which arrays that differ in length are filled up to the longest of a batch; None where all
            have one length.
        prepare: the user's function that makes inputs of columns, if there is one.
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
    def are_numbers(self) -> bool:
        """Whether what enters the model is feature columns as they come, with one number per row each."""
        return self.prepare is None and self.come_as_numbers

    @property
    def come_as_numbers(self) -> bool:
        """Whether every feature column has one number per row."""
        return all(column.kind == "number" and not column.shape for column in self.columns)

    def with_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> ModelInputs:
        """Return these inputs with the dtypes by name in which they enter the model."""
        found = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
        return replace(
            self, inputs=tuple(ModelInput(name=name, dtype=dtype) for name, dtype in found.items())
        )

    def prepared(self, batch: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Return a batch's inputs by name as arrays of numbers.

        Args:
            batch: the feature columns, or already their matrix, where it is that with which the model is called.

        Raises:
            DataError: if a column is missing, has rows of another shape, or holds what is no number; or the user's
                function fails on the rows.
            ParamError: if the user's function returns what is no input.
        """
        if self.given_by == "matrix" and MATRIX in batch and batch[MATRIX].ndim == 2:
            return {MATRIX: batch[MATRIX]}
        columns = {column.name: _checked(batch, column) for column in self.columns}
        if self.given_by == "matrix":
            return {MATRIX: np.stack(list(columns.values()), axis=1)}
        if self.prepare is None:
            return {name: self._as_numbers(name, values) for name, values in columns.items()}
        num_rows = len(next(iter(columns.values())))
        try:
            made = self.prepare(dict(columns))
        except DataError:  # of a ready-made estimator, which says what is wrong with which row
            raise
        except Exception as error:
            raise DataError(
                f"Param prepareFeatures failed on {num_rows} rows of {', '.join(columns)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Mapping):
            made = {self.columns[0].name: made}
        return {str(name): self._made(str(name), values, num_rows) for name, values in made.items()}

    def apply(self, module: nn.Module, arrays: Mapping[str, Any], device: torch.device) -> Any:
        """Call a module with prepared inputs, arrays or tensors, and return what it returns."""
        return self.call(module, self.tensors(arrays, device))

    def tensors(self, arrays: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return prepared inputs, arrays or tensors, as the tensors that a module takes."""
        return {
            each.name: to_features(arrays[each.name], dtype_named(each.dtype), device) for each in self.inputs
        }

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> Any:
        """Call a module with its inputs, and return what it returns."""
        return module(**tensors) if self.given_by == "name" else module(*tensors.values())

    def _made(self, name: str, values: Any, num_rows: int) -> npt.NDArray[Any]:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        if array.ndim == 0 or len(array) != num_rows:
            raise ParamError(
                f"Param prepareFeatures returned {name!r} of shape {array.shape} for {num_rows} rows. Return an array "
                "or a tensor with an item per row."
            )
        return self._as_numbers(name, array)

    def _as_numbers(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if values.dtype != object:
            return values
        return pad_rows(values, name=name, value=self.padding_value)


def _checked(batch: Arrays, column: Column) -> npt.NDArray[Any]:
    if column.name not in batch:
        raise DataError(f"There is no column {column.name!r}. The columns are: {', '.join(batch)}.")
    values = batch[column.name]
    if column.kind != "ragged" and values.shape[1:] != column.shape:
        raise DataError(
            f"Column {column.name!r} has rows of shape {values.shape[1:]}, and the model was trained on {column.shape}."
        )
    return values
