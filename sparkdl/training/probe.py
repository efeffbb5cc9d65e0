"""Tries the model, the loss and the optimizer on one row, before anything starts. Runs on the *driver*.

One forward and backward pass finds out what otherwise fails on every rank at once: features that do not fit
the model, outputs that do not fit the loss, the number of classes, and the dtypes in which columns enter.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparkdl.errors import DataError, ParamError
from sparkdl.training.columns import candidate_dtypes, parameter_dtype, to_features, to_tensor
from sparkdl.training.losses import (
    LossFunction,
    compute_loss,
    is_class_loss,
    is_torch_loss,
    match_targets,
    prediction_kind,
)
from sparkdl.training.optimizer import make_optimizer
from sparkdl.training.predictor import decide

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sparkdl.training.spec import OptimizerFactory

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ProbeResult:
    """What one row tells.

    Attributes:
        features_dtype: torch dtype in which the features enter the model.
        label_dtype: torch dtype in which the labels enter the loss.
        num_classes: number of classes for a loss over classes, else None.
        prediction_shape: shape of one row's prediction.
        has_unused_parameters: whether some parameter got no gradient.
        has_sparse_gradients: whether some gradient is a sparse tensor.
        optimizer: that the factory made, of a copy of the model.
    """

    features_dtype: torch.dtype
    label_dtype: torch.dtype
    num_classes: int | None
    prediction_shape: tuple[int, ...]
    has_unused_parameters: bool
    has_sparse_gradients: bool
    optimizer: Optimizer


def probe(
    model: nn.Module,
    loss: LossFunction,
    optimizer: OptimizerFactory,
    *,
    features: npt.NDArray[np.generic],
    labels: npt.NDArray[np.generic],
    names: tuple[str, str],
    weighted: bool = False,
) -> ProbeResult:
    """Pass one row through a copy of the model and its loss.

    Args:
        model: the model; neither its weights nor its buffers change.
        loss: the loss.
        optimizer: the factory; called once, with the copy's parameters.
        features: ``(1, *shape)``, a row of the data.
        labels: ``(1, *shape)``, the label of that row.
        names: names of the feature and the label column, for messages.
        weighted: whether rows will have weights, for which the loss has to tell one value per row.

    Raises:
        DataError: if the model cannot take such features, or the loss such labels.
        ParamError: if the model's output is no tensor with one entry per row, the factory makes no optimizer,
            the optimizer cannot step by gradients alone, or rows are weighted and the loss reduces over them.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ParamError(
            "Param model has lazy layers without weights. Call the model once on a batch before fit."
        )
    # In eval() mode, as BatchNorm cannot normalize one row; on a copy, as buffers may change in any mode.
    trial = copy.deepcopy(model).to(_CPU).eval()
    features_dtype, outputs = _try_features(trial, features, names[0])
    made = make_optimizer(optimizer, trial)
    num_classes = _count_classes(loss, outputs)
    label_dtype, has_unused = _try_labels(trial, loss, outputs, labels, names[1], weighted)
    gradients = [parameter.grad for parameter in trial.parameters() if parameter.grad is not None]
    has_sparse = any(gradient.is_sparse for gradient in gradients)
    _try_step(made)
    predicted = decide(outputs.detach(), prediction_kind(loss))
    shape = tuple(predicted.shape[1:])
    return ProbeResult(
        features_dtype=features_dtype,
        label_dtype=label_dtype,
        num_classes=num_classes,
        prediction_shape=() if shape == (1,) else shape,
        has_unused_parameters=has_unused,
        has_sparse_gradients=has_sparse,
        optimizer=made,
    )


def _try_features(
    model: nn.Module, features: npt.NDArray[np.generic], name: str
) -> tuple[torch.dtype, Tensor]:
    failures = []
    for dtype in candidate_dtypes(str(features.dtype), model):
        try:
            outputs = model(to_features(features, dtype, _CPU))
        except Exception as error:
            failures.append(error)
            continue
        if not isinstance(outputs, Tensor) or outputs.ndim == 0 or outputs.shape[0] != 1:
            found = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ParamError(
                "Param model must return a tensor with one entry per row; for a batch of 1 row it "
                f"returned {found}."
            )
        return dtype, outputs
    raise DataError(
        f"Column {name!r} does not fit the model {type(model).__name__}: a batch of shape {features.shape} "
        f"and dtype {features.dtype} gave {type(failures[-1]).__name__}: {failures[-1]}"
    ) from failures[-1]


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
    loss: LossFunction,
    outputs: Tensor,
    labels: npt.NDArray[np.generic],
    name: str,
    weighted: bool,
) -> tuple[torch.dtype, bool]:
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
        model.zero_grad(set_to_none=True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Using a target size")  # a broadcast between rows
                compute_loss(loss, outputs, targets, row_weights).mean.backward(retain_graph=True)
        except ParamError:
            raise
        except Exception as error:
            failures.append(error)
            continue
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return dtype, any(parameter.grad is None for parameter in trained)
    raise DataError(
        f"Column {name!r} does not fit the loss: labels of shape {labels.shape} and dtype {labels.dtype} "
        f"with outputs of shape {tuple(outputs.shape)} gave {type(failures[0]).__name__}: {failures[0]}"
    ) from failures[0]


def _try_step(optimizer: Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:
        raise ParamError(
            f"Param optimizer makes {type(optimizer).__name__}, which cannot step by gradients alone: "
            f"{type(error).__name__}: {error}. Choose one that can, such as SGD or Adam."
        ) from error


def _label_dtypes(
    model: nn.Module, loss: LossFunction, labels: npt.NDArray[np.generic]
) -> tuple[torch.dtype, ...]:
    """Class labels are int64 even in a column of doubles; arrays of floats are probabilities."""
    if is_class_loss(loss) and (labels.ndim == 1 or not np.issubdtype(labels.dtype, np.floating)):
        return (torch.int64,)
    if is_torch_loss(loss) or np.issubdtype(labels.dtype, np.floating):
        return parameter_dtype(model), torch.int64
    return torch.int64, parameter_dtype(model)
