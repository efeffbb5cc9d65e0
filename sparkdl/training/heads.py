"""What a model is trained to tell: a label column, the loss that holds an output against it, and what it weighs.

The same on ranks and when a fit is tried on the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparkdl.errors import DataError, ParamError
from sparkdl.training.columns import dtype_named, to_tensor

if TYPE_CHECKING:
    import torch

    from sparkdl.training.losses import LossFunction


NO_LABEL = "prediction"
"""What the output of a model is called that no label column calls for, as a step of the user's own finds the loss."""


@dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """A label column.

    Attributes:
        name: of the column.
        dtype: torch dtype in which labels enter the loss.
        shape: of one row's label.
        classes: what the class of each number is called in the column, in ascending order; None where the column
            holds the numbers themselves.
    """

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    classes: tuple[Any, ...] | None = None

    def encoded(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the labels of a batch as numbers.

        Raises:
            DataError: if a label is none of the classes.
        """
        if self.classes is None:
            return values
        return class_numbers(values, self.classes, self.name)

    def tensor(self, batch: Mapping[str, Any], device: torch.device) -> Tensor:
        """Return the labels of a prepared batch as they enter the loss."""
        return to_tensor(batch[self.name], dtype_named(self.dtype), device)


def class_numbers(values: npt.NDArray[Any], classes: Sequence[Any], name: str) -> npt.NDArray[np.int64]:
    """Return for each value the place that it has among the classes, which are in ascending order.

    Raises:
        DataError: if a value is none of them.
    """
    known = np.array(classes, dtype=object) if values.dtype == object else np.array(classes)
    numbers = np.minimum(np.searchsorted(known, values), len(known) - 1)
    unknown = known[numbers] != values
    if unknown.any():
        shown = ", ".join(map(repr, classes[:10])) + (", ..." if len(classes) > 10 else "")
        raise DataError(
            f"Column {name!r} holds {values[unknown].tolist()[0]!r}, which is none of the {len(classes)} classes that "
            f"the fit found: {shown}."
        )
    return numbers.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Head:
    """One output of a model and what it is held against.

    Attributes:
        label: the column.
        loss: called with ``(output, labels)``; see :mod:`sparkdl.training.losses`. None where the user's own step finds
            the loss.
        weight: of this head's loss in the sum of all.
    """

    label: LabelColumn
    loss: LossFunction | None
    weight: float = 1.0


def output_of_each(outputs: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return a model's outputs by the names of the label columns: in their order, or as the model names them.

    Raises:
        ParamError: if they are not one tensor for each.
    """
    if len(names) == 1 and isinstance(outputs, Tensor):
        return {names[0]: outputs}
    if isinstance(outputs, Mapping):
        found = {name: outputs[name] for name in names if name in outputs}
    elif isinstance(outputs, tuple | list):
        found = dict(zip(names, outputs, strict=False)) if len(outputs) == len(names) else {}
    else:
        found = {}
    if len(found) != len(names) or not all(isinstance(each, Tensor) for each in found.values()):
        raise ParamError(f"Param model must return {_wanted(names)}; it returned {_shown(outputs)}.")
    return found


def first_output(outputs: Any) -> dict[str, Tensor]:
    """Return the first tensor that a model returned, as what it predicts where no label column calls for that.

    Raises:
        ParamError: if there is none.
    """
    each: Iterable[Any] = ()
    if isinstance(outputs, Mapping):
        each = outputs.values()
    elif isinstance(outputs, tuple | list | Tensor):
        each = [outputs] if isinstance(outputs, Tensor) else outputs
    for found in each:
        if isinstance(found, Tensor):
            return {NO_LABEL: found}
    raise ParamError(
        "Param model must return a tensor with one entry per row, alone or as the first of several; it returned "
        f"{_shown(outputs)}."
    )


def _wanted(names: Sequence[str]) -> str:
    if len(names) == 1:
        return "a tensor with one entry per row"
    return f"a tensor for each of {', '.join(names)}, as a tuple in this order or as a dict with these names"


def _shown(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a dict with {', '.join(map(str, outputs)) or 'nothing'}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
