"""Decisions about classes: scores, probabilities and predictions from the outputs of a module, also by thresholds.

As in Spark ML, ``rawPrediction`` and ``probability`` are vectors with an entry per class, also for two classes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.model.losses import PredictionKind
    from sparkdl.model.signature import ModelOutput

BINARY = ("binary_logit", "binary_probability")
CLASSES = ("class", "class_margin", "class_probability")


def has_scores(output: ModelOutput) -> bool:
    """Return whether an output has a score for each class of a row."""
    return output.kind in (*BINARY, *CLASSES) and not output.shape


def has_probabilities(output: ModelOutput) -> bool:
    """Return whether an output has a probability for each class of a row; margins are not probabilities."""
    return has_scores(output) and output.kind != "class_margin"


def class_scores(outputs: Tensor, kind: PredictionKind) -> Tensor:
    """Return the score of each class, float64 of shape ``(N, classes)``.

    The scores are the module's outputs. A binary logit z gives -z and z, and a probability p of the second class gives
    1 - p and p.
    """
    scores = _in_rows(outputs)
    if kind == "binary_logit":
        return torch.cat([-scores, scores], dim=1)
    if kind == "binary_probability":
        return torch.cat([1 - scores, scores], dim=1)
    return scores


def class_probabilities(outputs: Tensor, kind: PredictionKind) -> Tensor:
    """Return the probability of each class, float64 of shape ``(N, classes)``.

    For kind ``"class"``, that is the softmax of the module's scores; the softmax of log-probabilities, as NLLLoss takes
    them, is the probabilities.
    """
    if kind == "class":
        return _in_rows(outputs).softmax(dim=1)
    if kind == "binary_logit":
        return class_scores(outputs, kind).sigmoid()
    return class_scores(outputs, kind)


def _in_rows(outputs: Tensor) -> Tensor:
    numbers = outputs.to(torch.float64)
    return numbers.flatten(1) if numbers.ndim > 1 else numbers.unsqueeze(1)


def to_label_values(predictions: npt.NDArray[np.float64], output: ModelOutput) -> npt.NDArray[Any]:
    """Return predictions as values of the label column; numbers as doubles, as Spark ML's evaluators need them."""
    if output.classes is None:
        return predictions
    dtype = {str: object, bool: bool}.get(type(output.classes[0]), np.float64)
    classes: npt.NDArray[Any] = np.array(output.classes, dtype=dtype)
    return classes[predictions.astype(np.int64)]


def decide_by_thresholds(probabilities: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Return the class with the largest ratio of probability and threshold, as Spark ML does; a threshold of 0 wins."""
    divisors = torch.tensor(thresholds, dtype=probabilities.dtype, device=probabilities.device)
    return torch.where(divisors == 0, math.inf, probabilities / divisors).argmax(dim=1)


def with_thresholds(
    outputs: Sequence[ModelOutput], thresholds: Sequence[float] | None
) -> tuple[ModelOutput, ...]:
    """Return the outputs of a model that predicts by thresholds; None for the most probable class.

    Raises:
        ParamError: if there are several outputs, or the only one has no probability of each class, or another number
            of classes.
    """
    if thresholds is None:
        return tuple(replace(output, thresholds=None) for output in outputs)
    if len(outputs) > 1 or not has_probabilities(outputs[0]):
        predicted = (
            f"{len(outputs)} columns" if len(outputs) > 1 else f"{outputs[0].name!r} without probabilities"
        )
        raise ParamError(
            f"Param thresholds is set, and the model predicts {predicted}. It takes one column of classes with "
            "probabilities."
        ).about("thresholds")
    (output,) = outputs
    num_classes = output.num_classes or 2
    if len(thresholds) != num_classes:
        raise ParamError(
            f"Param thresholds has {len(thresholds)} numbers, and the model has {num_classes} classes. Give one for "
            "each, in the order of the entries of probabilityCol."
        ).about("thresholds")
    return (replace(output, thresholds=tuple(thresholds)),)


def decide(outputs: Tensor, kind: PredictionKind) -> Tensor:
    """Turn a module's outputs into predictions.

    Kinds of classes: index of the largest of ``(N, classes, ...)``; ``"binary_logit"`` and ``"binary_probability"``: 1
    above 0 or 0.5, else 0; ``"value"``, ``"text"`` and ``"tokens"``: the output itself.
    """
    if kind in CLASSES:
        return outputs.argmax(dim=1)
    if kind == "binary_logit":
        return outputs > 0
    if kind == "binary_probability":
        return outputs > 0.5
    return outputs
