"""Losses: how they reduce, which labels they take, what a prediction is, and the weighted mean over a batch.

Used on *ranks*, and on the *driver* when it tries a fit.

A loss is any callable of ``(outputs, targets)``. The modules of :mod:`torch.nn` have attributes that say how they
reduce; any other callable is assumed to return the mean over the rows, or one value per row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparkdl.errors import ParamError

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Reduction: TypeAlias = Literal["mean", "sum", "none"]
PredictionKind: TypeAlias = Literal[
    "class",
    "class_margin",
    "class_probability",
    "binary_logit",
    "binary_probability",
    "value",
    "text",
    "tokens",
]

_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_IGNORE_INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_DEFAULT_IGNORE_INDEX = -100
_MODULE_OF_FUNCTION: dict[Callable[..., Tensor], type[nn.Module]] = {
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.huber_loss: nn.HuberLoss,
    functional.l1_loss: nn.L1Loss,
    functional.mse_loss: nn.MSELoss,
    functional.nll_loss: nn.NLLLoss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
}

LOSSES_BY_NAME: dict[str, type[nn.Module]] = {
    name: module
    for function, module in _MODULE_OF_FUNCTION.items()
    for name in {function.__name__, function.__name__.removesuffix("_loss")}
}
"""Losses of torch by the names of their functions, with and without ``_loss``, such as ``mse`` and ``mse_loss``."""


@dataclass(frozen=True)
class LossTerm:
    """The loss of one rank's batch: ``mean * weight`` is its sum.

    Attributes:
        mean: mean loss of the batch, a scalar tensor with a graph.
        weight: divisor of the mean: the number of rows, or the sum of the rows' weights.
    """

    mean: Tensor
    weight: float


def as_module(loss: LossFunction) -> LossFunction:
    """Return the module that corresponds to a function of :mod:`torch.nn.functional`, and any other loss unchanged."""
    try:
        module = _MODULE_OF_FUNCTION.get(loss)
    except TypeError:  # not hashable, so not one of them
        return loss
    return loss if module is None else module()


def is_torch_loss(loss: LossFunction) -> bool:
    """Return whether a loss follows the rules of :mod:`torch.nn`: it is one of its losses, or says that it does."""
    return isinstance(loss, nn.Module) and (
        type(loss).__module__ == nn.MSELoss.__module__ or getattr(type(loss), "has_rules_of_torch", False)
    )


def reduction_of(loss: LossFunction) -> Reduction:
    """Return how a loss reduces over the rows; ``"mean"`` for a callable without an attribute ``reduction``."""
    return cast("Reduction", getattr(loss, "reduction", "mean"))


def is_class_loss(loss: LossFunction) -> bool:
    """Return whether the targets of a loss are class indices or arrays of class probabilities."""
    return isinstance(loss, _CLASS_LOSSES)


def ignored_label(loss: LossFunction) -> int | None:
    """Return the label that a loss ignores, if it was set explicitly, else None."""
    if isinstance(loss, _IGNORE_INDEX_LOSSES) and loss.ignore_index != _DEFAULT_IGNORE_INDEX:
        return int(loss.ignore_index)
    return None


def ignores_by_default(loss: LossFunction) -> bool:
    """Return whether a loss ignores the label -100, torch's default."""
    return isinstance(loss, _IGNORE_INDEX_LOSSES) and loss.ignore_index == _DEFAULT_IGNORE_INDEX


def prediction_kind(loss: LossFunction) -> PredictionKind:
    """Return the meaning of the outputs of a model trained with this loss.

    ``"class"``: one score per class; their softmax is the probabilities, and the index of the largest the prediction.
    ``"class_margin"``: the same for scores that give no probabilities. ``"binary_logit"`` and
    ``"binary_probability"``: the prediction is 1 above 0 and above 0.5. ``"value"``: the output is the prediction. No
    loss has the kind ``"class_probability"``, where the outputs are the probabilities of the classes.
    """
    if isinstance(loss, nn.MultiMarginLoss):
        return "class_margin"
    if is_class_loss(loss):
        return "class"
    if isinstance(loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss):
        return "binary_logit"
    if isinstance(loss, nn.BCELoss):
        return "binary_probability"
    return "value"


def match_targets(loss: LossFunction, outputs: Tensor, targets: Tensor) -> Tensor:
    """Add a trailing axis to scalar labels for a model with one output, so that both have the shape ``(N, 1)``.

    Broadcasting ``(N, 1)`` against ``(N,)`` would otherwise silently compare every row with every other row. Only for
    losses that follow torch's rules: a user's own loss receives the labels as the column holds them.
    """
    if (
        is_torch_loss(loss)
        and not is_class_loss(loss)
        and targets.ndim == outputs.ndim - 1
        and outputs.shape[-1] == 1
    ):
        return targets.unsqueeze(-1)
    return targets


def needs_global_weight(loss: LossFunction, *, weighted: bool, label_is_scalar: bool) -> bool:
    """Return whether the divisor of the mean depends on labels or row weights, so that ranks sum it in each step."""
    if weighted:
        return True
    if not isinstance(loss, _IGNORE_INDEX_LOSSES) or loss.reduction != "mean":
        return False
    return loss.weight is not None or ignored_label(loss) is not None or not label_is_scalar


def compute_loss(
    loss: LossFunction,
    outputs: Tensor,
    targets: Tensor,
    row_weights: Tensor | None = None,
    *,
    weighted_by: str = "weightCol",
) -> LossTerm:
    """Return the mean loss of a batch and its weight.

    Args:
        loss: loss function; its own reduction is kept unless ``row_weights`` are given.
        outputs: outputs of the model, ``(N, ...)``.
        targets: labels as returned by :func:`match_targets`.
        row_weights: non-negative weights of the rows, ``(N,)``; None if every row counts once.
        weighted_by: name of the Param that gives rows weights, for an error.

    Raises:
        ParamError: if ``row_weights`` are given and the loss does not return one value per row.
    """
    if row_weights is not None:
        return _weighted_loss(loss, outputs, targets, row_weights, weighted_by)
    num_rows = float(targets.shape[0])
    value = loss(outputs, targets)
    if reduction_of(loss) == "sum":
        return LossTerm(mean=value / num_rows, weight=num_rows)
    if value.ndim > 0:
        return LossTerm(mean=value.mean(), weight=num_rows)
    divisor = _label_weights(loss, targets)
    if divisor is None:
        return LossTerm(mean=value, weight=num_rows)
    weight = float(divisor.sum())
    # The mean of a batch in which every label is ignored is 0 / 0; such a batch contributes no gradient.
    return LossTerm(mean=value if weight > 0 else outputs.sum() * 0, weight=weight)


def _weighted_loss(
    loss: LossFunction, outputs: Tensor, targets: Tensor, row_weights: Tensor, weighted_by: str
) -> LossTerm:
    values = _unreduce(loss)(outputs, targets)
    if values.ndim == 0 or values.shape[0] != row_weights.shape[0]:
        raise ParamError(
            f"Param {weighted_by} needs one loss value per row, but the loss returned shape {tuple(values.shape)} for "
            f"{row_weights.shape[0]} rows. Use a loss of torch.nn, or a function that does not reduce."
        ).about(weighted_by, "loss")
    divisor = _label_weights(loss, targets)
    if divisor is None:
        values = values.flatten(1).mean(dim=1) if values.ndim > 1 else values
        divisor = torch.ones_like(row_weights)
    # Of several labels per row, those that the loss ignores do not count, as without row weights.
    of_labels = row_weights.reshape(-1, *[1] * (divisor.ndim - 1))
    weight = float((of_labels * divisor).sum())
    total = (values * of_labels.to(values.dtype)).sum()
    return LossTerm(mean=total / weight if weight > 0 else outputs.sum() * 0, weight=weight)


def _unreduce(loss: LossFunction) -> LossFunction:
    if not isinstance(loss, nn.Module) or not hasattr(loss, "reduction"):
        return loss
    unreduced: Any = copy.copy(loss)
    unreduced.reduction = "none"
    return cast("LossFunction", unreduced)


def _label_weights(loss: LossFunction, targets: Tensor) -> Tensor | None:
    """Return what each label adds to the divisor of the mean, as torch.nn defines it; None if each label adds 1."""
    if not isinstance(loss, _IGNORE_INDEX_LOSSES) or targets.is_floating_point():
        return None
    counted = targets != loss.ignore_index
    if loss.weight is None:
        return counted.to(torch.float32)
    return loss.weight[torch.where(counted, targets, 0)] * counted
