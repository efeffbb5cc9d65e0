"""Metrics by name, made for the outputs that a loss compares with labels.

``accuracy``, ``auroc`` (of two classes), ``mae``, ``mse``, ``rmse`` and ``r2`` follow from sums over rows, which ranks
add up once per pass: any division of the rows among ranks gives the same value. All other names are those of functions
in torchmetrics, an optional library, such as ``f1_score`` and ``matthews_corrcoef``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import ParamError, did_you_mean
from sparkdl.foreign_errors import needing
from sparkdl.model.losses import ignored_label, prediction_kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from sparkdl.model.losses import LossFunction, PredictionKind


class RowSums(ABC):
    """A metric that follows from sums over rows. Subclasses are frozen dataclasses, which travel to the ranks.

    Attributes:
        size: number of sums.
    """

    size: ClassVar[int]

    @abstractmethod
    def add(self, sums: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add the rows of a batch.

        Args:
            sums: float64 tensor of shape ``(size,)``, to which the sums of the batch are added.
            outputs: outputs of the model.
            targets: labels, as the loss compares them with the outputs.
        """

    def value(self, sums: npt.NDArray[np.float64]) -> float:
        """Return the metric of all rows that were added, NaN if they do not define it.

        Here it is a mean: the first sum, divided by the second.
        """
        return float(sums[0] / sums[1]) if sums[1] else math.nan


@dataclass(frozen=True, kw_only=True)
class Accuracy(RowSums):
    """The share of labels that are predicted: of rows, or of all labels where a row has several.

    Attributes:
        kind: meaning of the outputs.
        ignored: label that does not count; None if all labels count.
    """

    kind: PredictionKind
    ignored: int | None = None

    size: ClassVar[int] = 2  # right and counted labels

    def add(self, sums: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add the rows of a batch; see :class:`RowSums`."""
        if self.kind in ("class", "class_margin"):
            predicted = outputs.argmax(dim=1)
            labels = _class_labels(targets)
        else:
            predicted = _like(outputs, targets, "accuracy") > (0 if self.kind == "binary_logit" else 0.5)
            labels = targets > 0.5
        _check_shapes(predicted, labels, "accuracy")
        is_right = predicted == labels
        if self.ignored is None or targets.is_floating_point():
            sums[1] += is_right.numel()
        else:
            counts = labels != self.ignored
            is_right = is_right & counts
            sums[1] += counts.sum()
        sums[0] += torch.where(outputs.isnan().any(), math.nan, is_right.sum())


def _class_labels(targets: Tensor) -> Tensor:
    """Return the numbers of the classes; for rows of class probabilities, that of the most probable class."""
    return targets.argmax(dim=1) if targets.is_floating_point() else targets


_NUM_BINS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class AreaUnderROC(RowSums):
    """The area under the ROC curve of two classes.

    It is the probability that a row of the second class has a higher score than a row of the first one (Hanley and
    McNeil, "The Meaning and Use of the Area under a ROC Curve", 1982). Scores are logits, rounded to the 7 bits of
    bfloat16's mantissa; rows with equal rounded scores count one half. Scores that differ by less than a percent of
    their size are thus not told apart, as those of a model that predicts nearly the same for all rows.

    Attributes:
        kind: meaning of the outputs.
        ignored: label that does not count; None if all labels count.
    """

    kind: PredictionKind
    ignored: int | None = None

    size: ClassVar[int] = 2 * _NUM_BINS  # rows of both classes by rounded score

    def add(self, sums: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add the rows of a batch; see :class:`RowSums`."""
        if self.kind in ("class", "class_margin"):
            scores = outputs[:, 1] - outputs[:, 0]
            labels = _class_labels(targets)
        else:
            scores = outputs if self.kind == "binary_logit" else torch.logit(outputs)
            labels = (targets > 0.5).long()
        scores, labels = scores.flatten(), labels.flatten()
        _check_shapes(scores, labels, "auroc")
        if self.ignored is not None:
            counts = labels != self.ignored
            scores, labels = scores[counts], labels[counts]
        bins = _bin_of(scores) + _NUM_BINS * labels
        sums.index_add_(0, bins, torch.where(scores.isnan(), math.nan, 1.0).to(sums.dtype))

    def value(self, sums: npt.NDArray[np.float64]) -> float:
        """Return the area from 0 to 1; NaN if a class has no rows."""
        first, second = sums.reshape(2, _NUM_BINS)
        num_pairs = first.sum() * second.sum()
        lower = np.cumsum(first) - first
        return float((second * (lower + first / 2)).sum() / num_pairs) if num_pairs else math.nan


def _bin_of(scores: Tensor) -> Tensor:
    """Return the number of each score's bin, which grows with the score: the upper 16 bits of its float32 form."""
    bits = (scores.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((ascending >> 16) + (_NUM_BINS >> 1)).long()


@dataclass(frozen=True, kw_only=True)
class MeanError(RowSums):
    """The mean of the errors' absolute values (``mae``) or squares (``mse``), or the root of the latter (``rmse``).

    Attributes:
        name: name of the metric.
    """

    name: str

    size: ClassVar[int] = 2  # the sum of the errors and their number

    def add(self, sums: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add the rows of a batch; see :class:`RowSums`."""
        errors = _errors(self.name, outputs, targets)
        sums[0] += errors.abs().sum() if self.name == "mae" else errors @ errors
        sums[1] += len(errors)

    def value(self, sums: npt.NDArray[np.float64]) -> float:
        """Return the error in the unit of the labels, for ``mse`` in its square; NaN without rows."""
        mean = super().value(sums)
        return math.sqrt(mean) if self.name == "rmse" else mean


@dataclass(frozen=True, kw_only=True)
class RSquared(RowSums):
    """The coefficient of determination: the share of the labels' variance that the model explains.

    Attributes:
        center: number near the labels, which is subtracted before they are squared, so that float64 is exact enough.
    """

    center: float = 0.0

    size: ClassVar[int] = (
        4  # sums of the errors' squares, the labels and their squares, and the number of rows
    )

    def add(self, sums: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add the rows of a batch; see :class:`RowSums`."""
        if targets.numel() != len(targets):
            raise ParamError(
                f"Metric 'r2' takes one number per row, and the labels have shape {tuple(targets.shape)}. Use "
                "torchmetrics.R2Score(multioutput=...)."
            )
        errors = _errors("r2", outputs, targets)
        labels = targets.flatten().double() - self.center
        sums += torch.stack(
            [errors @ errors, labels.sum(), labels @ labels, torch.full_like(errors[0], len(labels))]
        )

    def value(self, sums: npt.NDArray[np.float64]) -> float:
        """Return the share, at most 1 and below 0 if the mean label is better; NaN if all labels are equal."""
        errors, total, squares, count = sums
        variation = squares - total * total / count if count else 0.0
        return float(1 - errors / variation) if variation > _ROUNDING * squares else math.nan


_ROUNDING = 1e-10
"""Share of the sum of squares below which a variation may be rounding."""


def _errors(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the differences as float64, of shape ``(numbers,)``."""
    return _like(outputs, targets, name).flatten().double() - targets.flatten().double()


def _like(outputs: Tensor, targets: Tensor, name: str) -> Tensor:
    """Return outputs in the shape of the labels, which may lack a last axis of one."""
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    _check_shapes(outputs, targets, name)
    return outputs


def _check_shapes(outputs: Tensor, targets: Tensor, name: str) -> None:
    """Refuse shapes that differ: torch would broadcast them, and compare each label with each output."""
    if outputs.shape != targets.shape:
        raise ParamError(
            f"Metric {name!r} compares each label with one output, and the outputs have shape {tuple(outputs.shape)}, "
            f"the labels {tuple(targets.shape)}."
        )


@dataclass(frozen=True, kw_only=True)
class LibraryMetric:
    """A factory of a metric of torchmetrics, and what it gets of the outputs.

    Attributes:
        class_name: name of the class in torchmetrics.
        kind: meaning of the outputs.
        num_classes: number of classes; None for numbers and for two classes with one output.
        ignored: label that does not count; None if all labels count.
    """

    class_name: str
    kind: PredictionKind
    num_classes: int | None = None
    ignored: int | None = None

    def __call__(self) -> Any:
        """Return the metric, with the averages over classes that are its defaults."""
        import torchmetrics

        options: dict[str, Any] = {} if self.kind == "value" else {"ignore_index": self.ignored}
        if self.class_name.startswith("Multiclass"):
            options["num_classes"] = self.num_classes
        where = torchmetrics.regression if self.kind == "value" else torchmetrics.classification
        return getattr(where, self.class_name)(**options)

    def arguments(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and labels as the metric takes them: probabilities of the classes, and their numbers.

        torchmetrics would take the logits of a batch for probabilities if all of them happen to be between 0 and 1.
        """
        if self.kind == "value":
            return outputs.reshape(targets.shape), targets
        if self.kind in ("class", "class_margin"):
            targets = _class_labels(targets)
            outputs = outputs.softmax(dim=1)
            outputs = outputs[:, 1] if self.num_classes == 2 else outputs
        elif self.kind == "binary_logit":
            outputs = outputs.sigmoid()
        return outputs, targets.long()


OF_CLASSES = ("accuracy", "auroc")
OF_NUMBERS = ("mae", "mse", "rmse", "r2")
MAXIMIZED = ("accuracy", "auroc", "r2")
"""The named metrics of this module that are better if they are larger."""


def check_metric_name(name: str) -> None:
    """Check that there is a metric with a name, whatever the outputs are.

    Raises:
        ParamError: if there is none, or it needs torchmetrics, which is not installed.
    """
    if name not in (*OF_CLASSES, *OF_NUMBERS):
        _names_in_library(name)


def named_metric(
    name: str, loss: LossFunction, *, num_classes: int | None, center: float = 0.0
) -> RowSums | LibraryMetric:
    """Return the metric with a name for the outputs of a model that is trained with a loss.

    Args:
        name: one of this module's names, or the name of a function of torchmetrics.
        loss: loss of the training, which gives the outputs their meaning.
        num_classes: number of classes; None for a loss without classes.
        center: number near the labels, for ``r2``.

    Raises:
        ParamError: if there is no such metric, or none for such outputs.
    """
    kind, ignored = prediction_kind(loss), ignored_label(loss)
    if kind == "class" and ignored is None:
        ignored = -100  # torch's default, which no class has
    loss_name = (
        type(loss).__name__ if isinstance(loss, torch.nn.Module) else getattr(loss, "__name__", "loss")
    )
    is_value = kind == "value"
    if name in (OF_CLASSES if is_value else OF_NUMBERS):
        predicted, other = ("numbers", OF_NUMBERS) if is_value else ("classes", OF_CLASSES)
        raise ParamError(
            f"Metric {name!r} does not fit the loss {loss_name}: the model predicts {predicted}. Choose "
            f"{', '.join(other)}, a metric of torchmetrics, or a function of (outputs, labels)."
        )
    if name == "accuracy":
        return Accuracy(kind=kind, ignored=ignored)
    if name == "auroc" and num_classes in (None, 2):
        return AreaUnderROC(kind=kind, ignored=ignored)
    if name == "r2":
        return RSquared(center=center)
    if name in OF_NUMBERS:
        return MeanError(name=name)
    found = _names_in_library(name)
    wanted = "" if is_value else "Binary" if num_classes in (None, 2) else "Multiclass"
    if wanted not in found:
        raise ParamError(
            f"Metric {name!r} of torchmetrics does not fit the loss {loss_name}: the model predicts "
            f"{'numbers' if is_value else 'classes'}."
        )
    return LibraryMetric(class_name=found[wanted], kind=kind, num_classes=num_classes, ignored=ignored)


_PREFIXES = ("Binary", "Multiclass")


def _names_in_library(name: str) -> dict[str, str]:
    """Return the classes of torchmetrics for the name of a function: by ``Binary``, ``Multiclass`` and ``""``."""
    own = ", ".join((*OF_CLASSES, *OF_NUMBERS))
    with needing(f"Metric {name!r}, which is none of {own},", "metrics", "torchmetrics"):
        import torchmetrics
    classes = {
        prefix: {class_name.lower(): class_name for class_name in class_names}
        for prefix, class_names in (
            *((prefix, torchmetrics.classification.__all__) for prefix in _PREFIXES),
            ("", torchmetrics.regression.__all__),
        )
    }

    def find(function: str) -> dict[str, str]:
        plain = function.replace("_", "").lower()
        wanted = {prefix: f"{prefix.lower()}{plain}" for prefix in classes}
        return {
            prefix: classes[prefix][lower] for prefix, lower in wanted.items() if lower in classes[prefix]
        }

    found = find(name)
    if not found:
        others = [one for one in dir(torchmetrics.functional) if one.islower() and find(one)]
        hint = did_you_mean(name, [*OF_CLASSES, *OF_NUMBERS, *others], show=repr)
        raise ParamError(
            f"There is no metric {name!r}. Metrics by name are {own}, and the functions of torchmetrics.functional for "
            f"classes and numbers, such as 'f1_score'. {hint}".rstrip()
        )
    return found
