"""The heads of a model: a label column, the loss that compares an output with it, and the weight of the loss.

Used on *ranks*, and on the *driver* when it tries a fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdl.errors import DataError, ParamError, list_names
from sparkdl.model.inputs import find_dtype, to_tensor
from sparkdl.model.losses import LossFunction

NO_LABEL = "prediction"
"""Name of the output of a model that has no label column, as a ``trainStep`` computes its loss."""


@dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """A label column.

    Attributes:
        name: name of the column.
        dtype: torch dtype in which labels enter the loss.
        shape: shape of one row's label.
        classes: value of each class in the column, in the order of the class indices; None where the column holds the
            numbers themselves.
    """

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    classes: tuple[Any, ...] | None = None

    def encode(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the labels of a batch as numbers.

        Raises:
            DataError: if a label is not one of the classes.
        """
        if self.classes is None:
            return values
        return class_numbers(values, self.classes, self.name)

    def class_numbers(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class of each label of a batch. A label that the loss ignores gets a number that is no class.

        Raises:
            DataError: if a label is not one of the classes, such as 0.7 where the loss takes 0 and 1.
        """
        labels = self.encode(values)
        self.check_classes(labels)
        return labels.astype(np.int64)

    def check_classes(self, labels: npt.NDArray[Any]) -> None:
        """Check encoded labels of rows that are weighted or repeated by their class.

        Raises:
            DataError: if the loss takes 0 and 1, and a label lies between them.
        """
        soft = labels[(labels != 0) & (labels != 1)] if self.dtype != "int64" else labels[:0]
        if soft.size:
            raise DataError(
                f"Column {self.name!r} holds {soft.flat[0]}, and rows that are weighted or repeated by their class "
                "need the labels 0 and 1. Leave classWeights and sampling out, and weigh rows with weightCol."
            )

    def tensor(self, batch: Mapping[str, Any], device: torch.device) -> Tensor:
        """Return the labels of a prepared batch as they enter the loss."""
        return to_tensor(batch[self.name], find_dtype(self.dtype), device)


def class_numbers(values: npt.NDArray[Any], classes: Sequence[Any], name: str) -> npt.NDArray[np.int64]:
    """Return for each value its index among the classes.

    Raises:
        DataError: if a value is not one of them.
    """
    known = np.array(classes, dtype=object) if values.dtype == object else np.array(classes)
    ascending = np.argsort(known)
    numbers = ascending[np.minimum(np.searchsorted(known, values, sorter=ascending), len(known) - 1)]
    unknown = known[numbers] != values
    if unknown.any():
        first = values[unknown].tolist()[0]
        shown = ", ".join(map(repr, classes[:10])) + (", ..." if len(classes) > 10 else "")
        raise DataError(
            f"Column {name!r} holds {first!r}, which is none of the {len(classes)} classes of the "
            f"fit: {shown}. Name it in labels, or leave such rows out."
        )
    return numbers.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Head:
    """One output of a model, with its label and loss.

    Attributes:
        label: label column.
        loss: loss function, called with ``(output, labels)``; see :mod:`sparkdl.model.losses`. None where the user's
            own training step computes the loss.
        weight: weight of this head's loss in the sum of all heads' losses.
        class_weights: weight of the rows of each class in the loss; None if all rows have weight 1.
        validation_class_weights: weight of validation rows of each class, if training rows are repeated in place of
            weighted; None for ``class_weights``.
    """

    label: LabelColumn
    loss: LossFunction | None
    weight: float = 1.0
    class_weights: tuple[float, ...] | None = None
    validation_class_weights: tuple[float, ...] | None = None

    def for_validation(self) -> Head:
        """Return the head with the class weights of validation rows."""
        return replace(self, class_weights=self.validation_class_weights or self.class_weights)

    def encode(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the labels of a batch as numbers.

        Raises:
            DataError: if a label is not one of the classes.
        """
        labels = self.label.encode(values)
        if self.class_weights is not None:
            self.label.check_classes(labels)
        return labels

    def row_weights(self, targets: Tensor, weights: Tensor | None) -> Tensor | None:
        """Return the weights of rows in the loss: those given, times the weights of the rows' classes.

        Args:
            targets: labels with one number per row, as the loss compares them with the outputs.
            weights: weights of the rows, of shape ``(rows,)``; None if all have weight 1.
        """
        if self.class_weights is None:
            return weights
        of_classes = torch.tensor(self.class_weights, device=targets.device)
        if targets.is_floating_point():  # 0 or 1, or between them where augment mixes rows
            of_class = of_classes[0].lerp(of_classes[1], targets.reshape(-1).to(of_classes.dtype))
        else:
            # A label that the loss ignores has no class; the loss leaves it out.
            of_class = of_classes[targets.reshape(-1).clamp(0, len(self.class_weights) - 1)]
        return of_class if weights is None else weights * of_class


def output_of_each(outputs: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return a model's outputs by the names of the label columns: in their order, or by the model's own names.

    With one label column, a dict without its name contributes its ``logits``, the name in transformers' models, or else
    its only tensor.

    Raises:
        ParamError: if the outputs are not one tensor for each label column.
    """
    if len(names) == 1 and isinstance(outputs, Tensor):
        return {names[0]: outputs}
    if isinstance(outputs, Mapping):
        by_name = {name: outputs[name] for name in names if name in outputs}
        if not by_name and len(names) == 1:
            tensors = {name: tensor for name, tensor in outputs.items() if isinstance(tensor, Tensor)}
            only = next(iter(tensors.values())) if len(tensors) == 1 else None
            by_name = {names[0]: outputs.get("logits", only)}
    elif isinstance(outputs, tuple | list):
        by_name = dict(zip(names, outputs, strict=False)) if len(outputs) == len(names) else {}
    else:
        by_name = {}
    if len(by_name) != len(names) or not all(isinstance(tensor, Tensor) for tensor in by_name.values()):
        hint = ""
        if isinstance(outputs, Mapping | tuple | list) and len(names) == 1:
            hint = (
                " Wrap it in a module that returns the tensor that the loss takes, or name that one 'logits'."
            )
        wanted = "a tensor with one entry per row"
        if len(names) > 1:
            wanted = f"a tensor for each of {list_names(names)}, as a tuple in this order or as a dict with these names"
        raise ParamError(f"Param model must return {wanted}; it returned {_describe(outputs)}.{hint}")
    return by_name


_PREFERRED = (NO_LABEL, "logits")


def first_output(outputs: Any) -> dict[str, Tensor]:
    """Return the prediction of a model without label columns: the ``logits`` of a dict, or else the first tensor.

    Raises:
        ParamError: if the model returned no tensor.
    """
    tensors: Iterable[Any] = ()
    if isinstance(outputs, Mapping):
        tensors = [*(outputs[name] for name in _PREFERRED if name in outputs), *outputs.values()]
    elif isinstance(outputs, tuple | list | Tensor):
        tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            return {NO_LABEL: tensor}
    raise ParamError(
        "Param model must return a tensor with one entry per row, alone or as the first of several; it returned "
        f"{_describe(outputs)}."
    )


def check_named(returned: Any, names: Sequence[str]) -> None:
    """Check that the names of outputs say which tensors of a module are meant, where the user gave the names.

    Args:
        returned: what the module returned.
        names: names of the outputs; only :data:`NO_LABEL` where the user gave none.

    Raises:
        ParamError: if a dict does not have a tensor of each name, or has several and no name was given.
    """
    if not isinstance(returned, Mapping):
        return
    tensors = [str(name) for name, value in returned.items() if isinstance(value, Tensor)]
    if list(names) != [NO_LABEL] and not {*names} <= {*tensors}:
        raise ParamError(
            f"outputs names {', '.join(names)}, and the module returns a dict with the tensors "
            f"{list_names(tensors)}. Name those that are predictions."
        )
    if list(names) == [NO_LABEL] and len(tensors) > 1 and not {*_PREFERRED} & {*tensors}:
        raise ParamError(
            f"The module returns a dict with the tensors {list_names(tensors)}, and outputs does not say which is the "
            f"prediction. Give outputs a dict with its name, such as {{{tensors[-1]!r}: 'class'}}."
        )


def outputs_of_rows(returned: Any, heads: Sequence[Head], num_rows: int) -> dict[str, Tensor]:
    """Return what a model returned for a batch by the names of its heads.

    Where the user's step computes the loss, a model need not have an output per label: its first tensor then counts.

    Raises:
        ParamError: if an output has not one entry per row.
    """
    labels = [head.label.name for head in heads]
    if any(head.loss is not None for head in heads):
        outputs = output_of_each(returned, labels)
    else:
        outputs = {}
        with suppress(ParamError):
            outputs = output_of_each(returned, labels)
        outputs = outputs or first_output(returned)
    for tensor in outputs.values():
        if tensor.ndim == 0 or tensor.shape[0] != num_rows:
            raise ParamError(
                f"Param model must return a tensor with one entry per row; for a batch of {num_rows} "
                f"row{'s' if num_rows > 1 else ''} it returned shape {tuple(tensor.shape)}."
            )
    return outputs


def _describe(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a dict with {', '.join(map(str, outputs)) or 'nothing'}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
