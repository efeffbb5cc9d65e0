"""Entries of the table of Params for ready-made estimators, in addition to those of all estimators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol

from sparkdl.errors import ParamError
from sparkdl.estimators.fit.labels import count_classes
from sparkdl.estimators.params.base import ParamsT
from sparkdl.estimators.params.estimator import _SharedParams
from sparkdl.estimators.params.inputs import HasLabels, HasScoredColumns, labels_by_column
from sparkdl.estimators.params.table import Entry, above, at_least, between, optional, param
from sparkdl.estimators.params.training import HasFunctions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sparkdl.data import Column, ParquetDataset


def check_one_column(params: _SharedParams, content: str) -> None:
    """Check that an estimator whose model takes one column is given one.

    Args:
        params: the estimator.
        content: what the column holds, such as ``images``, and what to do with several.

    Raises:
        ParamError: if it has several.
    """
    if len(params.getFeaturesCols()) > 1:
        raise ParamError(
            f"Param featuresCol is {params.getFeaturesCols()}, and {type(params).__name__} takes one column of "
            f"{content}."
        ).about("featuresCol", "featuresCols")


def describe_kind(column: Column) -> str:
    """Return what a column holds, for an error: ``numbers``, ``arrays of strings``, ``binary values`` and so on."""
    if column.kind == "ragged":
        return "arrays that differ in length"
    has_plural = column.kind in ("number", "string", "date", "timestamp")
    return f"{'arrays of ' if column.shape else ''}{column.kind}{'s' if has_plural else ' values'}"


def check_unset(params: Params, entries: Iterable[Param[Any]], other: str, why: str) -> None:
    """Check that no Param is set that has no effect beside another Param.

    Args:
        params: the estimator.
        entries: Params that must not be set.
        other: name of the other Param.
        why: clause that says why they have no effect.

    Raises:
        ParamError: if one of them is set.
    """
    for entry in entries:
        if params.isSet(entry):
            raise ParamError(
                f"Param {entry.name} is {params.getOrDefault(entry)!r}, and {why}. Leave {entry.name} out."
            ).about(entry.name, other)


class HasAdamW(Params):
    """Params for the optimizer of a ready-made network."""

    learningRate, getLearningRate, setLearningRate = param(
        TypeConverters.toFloat,
        "learning rate of the AdamW optimizer (> 0)",
        default=1e-3,
        check=above(0),
    )
    weightDecay, getWeightDecay, setWeightDecay = param(
        TypeConverters.toFloat,
        "weight decay of the AdamW optimizer (>= 0)",
        default=1e-4,
        check=at_least(0),
    )


PRETRAINED_LEARNING_RATE = 5e-5
"""Default learning rate of a pretrained model: that of Devlin et al. (2019) for BERT.

With the learning rate of new weights, a pretrained model loses what it has learned.
"""

RATE_WITH_PRETRAINED = HasAdamW.learningRate.reword(
    HasAdamW.learningRate.doc, more=f"With a pretrained model, the default is {PRETRAINED_LEARNING_RATE:.5f}."
)


def with_rate_of_pretrained(estimator: ParamsT) -> ParamsT:
    """Return an estimator, or a copy with the default learning rate of a pretrained model if it names one."""
    if not estimator.isSet("pretrained") or estimator.isSet("learningRate"):
        return estimator
    tuned = estimator.copy()
    tuned._setDefault(learningRate=PRETRAINED_LEARNING_RATE)
    return tuned


class HasAdapters(Params):
    """Params for adapters over pretrained weights."""

    loraRank, getLoraRank, setLoraRank = optional(
        TypeConverters.toInt,
        "rank of the LoRA adapters that are trained in place of the pretrained weights (> 0); default: no adapters",
        check=at_least(1),
        more="They need the library peft. The returned model has the adapters merged into its weights.",
    )


class HasDropout(Params):
    """Params for the regularization of a ready-made network."""

    dropout, getDropout, setDropout = param(
        TypeConverters.toFloat,
        "fraction of the outputs of hidden layers that is dropped in training (from 0 to below 1)",
        default=0.1,
        check=between(0, 1, has_low=True),
    )


class _ReadyMadeParams(HasLabelCol, _SharedParams, HasFunctions, HasAdamW, HasDropout):
    """Params of all ready-made estimators with a label."""

    _own_defaults: ClassVar[Mapping[str, Any]] = {"batchSize": 64, "epochs": 20}

    labelCol = Entry(TypeConverters.toString, "label column", default="label")

    def setLabelCol(self: ParamsT, value: str) -> ParamsT:
        """Set the label column."""
        return self._set(labelCol=value)


class _ReadyMadeClassifierParams(HasScoredColumns, HasLabels, _ReadyMadeParams):
    """Params of ready-made classifiers."""

    _own_defaults: ClassVar[Mapping[str, Any]] = {
        "probabilityCol": "probability",
        "rawPredictionCol": "rawPrediction",
    }

    labelCol = Entry(
        TypeConverters.toString,
        "column of class labels",
        default="label",
        more="The labels are whole numbers from 0, as in Spark ML, or strings, booleans or other integers. The "
        "predictions have the values of the labels.",
    )
    labels = HasLabels.labels.reword(
        "list of the class labels in the order of the model's outputs; default: the labels found in the rows, in "
        "ascending order",
        more="With this Param, the rows may lack a class, as in a fold of ``CrossValidator``, and need not be read to "
        "find the classes.",
    )
    probabilityCol = HasScoredColumns.probabilityCol.reword(
        HasScoredColumns.probabilityCol.doc,
        more="The classes are in ascending order, or in the order of ``labels``.",
    )

    def _count_classes(self, dataset: ParquetDataset) -> int:
        """Return the number of classes: the number of labels in Param ``labels``, or of the classes in the rows."""
        name = self.getLabelCol()
        named = labels_by_column(self.getLabels(), [name]).get(name)
        return count_classes(dataset, name) if named is None else len(named)
