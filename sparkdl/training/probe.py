"""Tries the model, the loss and the optimizer on one row, before anything starts. Runs on the *driver*.

One forward and backward pass finds out what otherwise fails on every rank at once: features that do not fit
the model, outputs that do not fit the loss, the number of classes, and the dtypes in which columns enter.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparkdl.data.dataset import listed
from sparkdl.errors import DataError, ParamError
from sparkdl.training.columns import candidate_dtypes, dtype_name, parameter_dtype, to_tensor
from sparkdl.training.crossed_rows import crosses_rows
from sparkdl.training.gradients import Gradients, TrialGradients, try_optimizer
from sparkdl.training.heads import Head, first_output, output_of_each
from sparkdl.training.losses import (
    LossFunction,
    compute_loss,
    is_class_loss,
    is_torch_loss,
    match_targets,
    prediction_kind,
)
from sparkdl.training.model_inputs import Arrays, ModelInputs
from sparkdl.training.optimizer import make_optimizer
from sparkdl.training.output_range import check_output_range
from sparkdl.training.predictor import decide
from sparkdl.training.trial_copy import trial_copy

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sparkdl.training.spec import OptimizerFactory

_CPU = torch.device("cpu")
_MAX_MIXED = 4
"""Of how many columns of integers each may stay integers or not, apart from the others."""

_WANTS_INTEGERS = re.compile("scalar types?:? Long")
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|tensor type|input type|result type|not implemented for '", re.IGNORECASE
)
"""What torch says of a tensor that has the wrong dtype for a layer, whatever its shape."""


@dataclass(frozen=True)
class ProbeResult:
    """What one row tells.

    Attributes:
        inputs: with the dtypes in which they enter the model.
        heads: with the dtypes in which labels enter the losses.
        num_classes: for each head how many classes it tells apart; None for a loss that is not over classes.
        prediction_shapes: of one row, by the name of each output: that of a label column, or NO_LABEL.
        gradients: that the losses left; of none where a step of the user's finds the loss.
        optimizer: that the factory made, of a copy of the model.
    """

    inputs: ModelInputs
    heads: tuple[Head, ...]
    num_classes: tuple[int | None, ...]
    prediction_shapes: Mapping[str, tuple[int, ...]]
    gradients: Gradients
    optimizer: Optimizer


def probe(
    model: nn.Module,
    optimizer: OptimizerFactory,
    *,
    inputs: ModelInputs,
    heads: Sequence[Head],
    row: Arrays,
    labels: Arrays,
    weighted: bool = False,
) -> ProbeResult:
    """Pass one row through a copy of the model and its losses.

    Args:
        model: the model; neither its weights nor its buffers change.
        optimizer: the factory; called once, with the copy's parameters.
        inputs: of the model; their dtypes are found out.
        heads: what its outputs are held against; the dtypes of labels are found out. Those without a loss are the
            user's step's.
        row: a row of the data, columns of shape ``(1, *shape)``.
        labels: of the row, likewise, as numbers.
        weighted: whether rows will have weights, for which losses have to tell one value per row.

    Raises:
        DataError: if the model cannot take such features, or a loss such labels.
        ParamError: if the model's outputs are no tensors with one entry per row or not what the loss takes, the
            factory makes no optimizer, the optimizer cannot step by gradients alone, or rows are weighted and a loss
            reduces over them.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ParamError(
            "Param model has lazy layers without weights. Call the model once on a batch before fit."
        )
    # In eval() mode, as BatchNorm cannot normalize one row; on a copy, as buffers may change in any mode.
    trial, shared = trial_copy(model, model)
    trial.to(_CPU).eval()
    gradients = TrialGradients(trial, shared)
    inputs, returned = _try_features(trial, inputs, inputs.prepared(row))
    outputs = _row_outputs(returned, heads)
    losses = {head.label.name: head.loss for head in heads}
    made = make_optimizer(optimizer, trial)
    num_classes = tuple(
        _count_classes(head.loss, outputs[head.label.name]) if head.loss is not None else None
        for head in heads
    )
    tried = tuple(
        _try_labels(trial, gradients, head, outputs.get(head.label.name), labels[head.label.name], weighted)
        for head in heads
    )
    if gradients.found.are_there:
        try_optimizer(made, shared)
    return ProbeResult(
        inputs=inputs,
        heads=tried,
        num_classes=num_classes,
        prediction_shapes={
            name: _prediction_shape(losses.get(name), tensor) for name, tensor in outputs.items()
        },
        gradients=gradients.found,
        optimizer=made,
    )


def _prediction_shape(loss: LossFunction | None, outputs: Tensor) -> tuple[int, ...]:
    kind = "value" if loss is None else prediction_kind(loss)
    shape = tuple(decide(outputs.detach(), kind).shape[1:])
    return () if shape == (1,) else shape


def _try_features(
    model: nn.Module, inputs: ModelInputs, arrays: Mapping[str, npt.NDArray[Any]]
) -> tuple[ModelInputs, Any]:
    """Return the inputs with the first dtypes that the model takes, and what it returned."""
    failures = []
    for dtypes in _dtype_choices(model, arrays):
        tried = inputs.with_dtypes(dict(zip(arrays, dtypes, strict=True)))
        try:
            return tried, tried.apply(model, arrays, _CPU)
        except Exception as error:
            failures.append(error)
    failure = _telling(failures)
    told = f"{type(failure).__name__}: {failure}"
    if _WANTS_INTEGERS.search(told):
        told = f"{told.rstrip('.')}. Cast whole numbers to bigint; decimals are taken as doubles."
    if len(arrays) == 1:
        ((name, array),) = arrays.items()
        told_of = "The matrix of the features" if inputs.given_by == "matrix" else f"Column {name!r}"
        raise DataError(
            f"{told_of} does not fit the model {type(model).__name__}: a batch of shape {array.shape} and dtype "
            f"{array.dtype} gave {told}"
        ) from failure
    given = listed(
        [f"{name!r} of shape {array.shape} and dtype {array.dtype}" for name, array in arrays.items()], 20
    )
    hint = (
        f'{"" if told.endswith(".") else "."} Where it takes them as one matrix, set passFeaturesBy="matrix".'
        if inputs.are_numbers and inputs.given_by == "position"
        else ""
    )
    raise DataError(
        f"The model {type(model).__name__} cannot be called with {given}: {told}{hint}"
    ) from failure


def _telling(failures: Sequence[Exception]) -> Exception:
    """The first failure that is not about the dtypes that were tried, else the one with those of the columns."""
    return next((each for each in failures if not _ABOUT_DTYPES.search(str(each))), failures[0])


def _dtype_choices(
    model: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]
) -> Iterator[tuple[torch.dtype, ...]]:
    """Dtypes for each input: as they are, where integers stay integers, then fewer and fewer of those."""
    candidates = [candidate_dtypes(str(array.dtype), model) for array in arrays.values()]
    if sum(len(each) > 1 for each in candidates) > _MAX_MIXED:
        yield tuple(each[0] for each in candidates)
        yield tuple(each[-1] for each in candidates)
    else:
        yield from product(*candidates)


def _row_outputs(returned: Any, heads: Sequence[Head]) -> dict[str, Tensor]:
    if any(head.loss is not None for head in heads):
        outputs = output_of_each(returned, [head.label.name for head in heads])
    else:
        outputs = _outputs_of_step(returned, [head.label.name for head in heads])
    for tensor in outputs.values():
        if tensor.ndim == 0 or tensor.shape[0] != 1:
            raise ParamError(
                "Param model must return a tensor with one entry per row; for a batch of 1 row it "
                f"returned shape {tuple(tensor.shape)}."
            )
    return outputs


def _outputs_of_step(returned: Any, labels: Sequence[str]) -> dict[str, Tensor]:
    """What a model predicts whose loss the user's step finds: a tensor for each label column, or else the first one."""
    if labels:
        with suppress(ParamError):
            return output_of_each(returned, labels)
    return first_output(returned)


def _count_classes(loss: LossFunction, outputs: Tensor) -> int | None:
    if not is_class_loss(loss):
        return None
    if outputs.ndim < 2:
        raise ParamError(
            f"{type(loss).__name__} takes one score per class, and the model returned shape "
            f"{tuple(outputs.shape)} for 1 row. Give the model an output of shape (rows, classes)."
        )
    return int(outputs.shape[1])


def _try_labels(
    model: nn.Module,
    gradients: TrialGradients,
    head: Head,
    outputs: Tensor | None,
    labels: npt.NDArray[np.generic],
    weighted: bool,
) -> Head:
    """Return the head with the dtype in which its labels enter its loss, whose gradients the model then has."""
    name, loss = head.label.name, head.loss
    if loss is None:
        dtype = torch.int64 if labels.dtype.kind in "biu" else parameter_dtype(model)
        return _with_dtype(head, dtype)
    assert outputs is not None, "a head with a loss has an output"
    failures = []
    row_weights = None
    if weighted:  # the row twice, as one row does not tell a value per row from a mean of shape (1,)
        outputs, labels = torch.cat([outputs, outputs]), np.concatenate([labels, labels])
        row_weights = torch.ones(2)
    for dtype in _label_dtypes(model, loss, labels):
        targets = match_targets(loss, outputs, to_tensor(labels, dtype, _CPU))
        if is_torch_loss(loss) and not is_class_loss(loss) and targets.shape != outputs.shape:
            raise DataError(
                f"Column {name!r} has labels of shape {labels.shape[1:]} per row, and the model's output has "
                f"{tuple(outputs.shape[1:])}. {type(loss).__name__} compares them element by element."
            )
        check_output_range(loss, outputs)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Using a target size")  # a broadcast between rows
                gradients.backward(compute_loss(loss, outputs, targets, row_weights).mean)
        except ParamError:
            raise
        except Exception as error:
            failures.append(error)
            continue
        if not is_torch_loss(loss) and crosses_rows(loss, outputs[:1], targets[:1]):
            raise ParamError(
                f"Param loss compares outputs of shape (N, 1) with the labels of column {name!r}, of shape (N,), which "
                "torch takes for every row with every other one. Give both one shape, as loss(outputs.squeeze(1), "
                "labels) does."
            )
        return _with_dtype(head, dtype)
    raise DataError(
        f"The model's outputs or the labels of column {name!r} do not fit the loss: labels of shape {labels.shape} "
        f"and dtype {labels.dtype} with outputs of shape {tuple(outputs.shape)} gave {type(failures[0]).__name__}: "
        f"{failures[0]}"
    ) from failures[0]


def _with_dtype(head: Head, dtype: torch.dtype) -> Head:
    return replace(head, label=replace(head.label, dtype=dtype_name(dtype)))


def _label_dtypes(
    model: nn.Module, loss: LossFunction, labels: npt.NDArray[np.generic]
) -> tuple[torch.dtype, ...]:
    """Class labels are int64 even in a column of doubles; arrays of floats are probabilities."""
    if is_class_loss(loss) and (labels.ndim == 1 or not np.issubdtype(labels.dtype, np.floating)):
        return (torch.int64,)
    if is_torch_loss(loss) or np.issubdtype(labels.dtype, np.floating):
        return parameter_dtype(model), torch.int64
    return torch.int64, parameter_dtype(model)
