"""What a module's outputs tell about classes: a score for each, and how probable each is. Needs torch only.

As Spark ML has it: ``rawPrediction`` and ``probability`` are vectors with an entry per class, also of two classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparkdl.training.losses import PredictionKind
    from sparkdl.training.signature import ModelOutput

_BINARY = ("binary_logit", "binary_probability")
_CLASSES = ("class", "class_margin")


def has_scores(output: ModelOutput) -> bool:
    """Return whether an output tells a score for each class of a row."""
    return output.kind in (*_BINARY, *_CLASSES) and not output.shape


def has_probabilities(output: ModelOutput) -> bool:
    """Return whether an output tells how probable each class of a row is; margins do not."""
    return has_scores(output) and output.kind != "class_margin"


def num_scores(output: ModelOutput) -> int:
    """Return of how many classes an output has scores; 0 where that was not noted."""
    return 2 if output.kind in _BINARY else output.num_classes or 0


def class_scores(outputs: Tensor, kind: PredictionKind) -> Tensor:
    """Return the scores of each class, float64 of shape ``(N, classes)``.

    Those of the module; of a logit z of two classes -z and z, of a probability p of the second one 1 - p and p.
    """
    scores = _in_rows(outputs)
    if kind == "binary_logit":
        return torch.cat([-scores, scores], dim=1)
    if kind == "binary_probability":
        return torch.cat([1 - scores, scores], dim=1)
    return scores


def class_probabilities(outputs: Tensor, kind: PredictionKind) -> Tensor:
    """Return the probability of each class, float64 of shape ``(N, classes)``.

    The softmax of a module's scores: of log-probabilities, as NLLLoss takes them, it is the probabilities.
    """
    if kind == "class":
        return _in_rows(outputs).softmax(dim=1)
    if kind == "binary_logit":
        return class_scores(outputs, kind).sigmoid()
    return class_scores(outputs, kind)


def _in_rows(outputs: Tensor) -> Tensor:
    numbers = outputs.to(torch.float64)
    return numbers.flatten(1) if numbers.ndim > 1 else numbers.unsqueeze(1)
