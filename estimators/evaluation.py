"""How good the predictions of a model are on labelled rows: ``TorchModel.evaluate``.

Spark counts and sums on the executors: the driver gets the confusion matrix, rows per score, or five sums. Names are
those of Spark ML's summaries of classification and regression.
"""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F

from sparkdl.data.dataset.dataset import missing_column_error, row_weights_error
from sparkdl.data.spark.columns import check_case, check_frame, quote, stored_type
from sparkdl.data.spark.input_files import check_tables
from sparkdl.data.spark.reading import reading_job
from sparkdl.errors import DataError, ParamError, count_of, list_names
from sparkdl.estimators.scoring.columns import value_type
from sparkdl.estimators.summary import ShownAsText, plots
from sparkdl.model.decisions import has_scores
from sparkdl.tracking import add_to_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from pyspark.sql import Column, DataFrame, SparkSession

    from sparkdl.estimators.torch_model import TorchModel
    from sparkdl.model.signature import ModelOutput


class ModelEvaluation(ShownAsText, ABC):
    """How good the predictions for one label column are."""

    @property
    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """The metrics by name, as they are logged to MLflow."""

    def __str__(self) -> str:
        """Return a text with a metric per line."""
        width = max(map(len, self.metrics))
        return "\n".join(f"{name.ljust(width)}  {value:.6g}" for name, value in self.metrics.items())


@dataclass(frozen=True, kw_only=True, repr=False)
class ClassificationEvaluation(ModelEvaluation):
    """How good the predicted classes are. ``print`` and notebooks show the metrics.

    Attributes:
        labels: labels of the classes: those of the model, then others that rows have.
        numInstances: number of rows that count.
        confusion: number of rows, int64 of shape ``(labels, labels)``, by their label and then by their prediction;
            with ``weightCol`` the sum of their weights, float64.
        numLeftOut: number of rows without a label or without a prediction, which do not count.
    """

    labels: tuple[Any, ...]
    numInstances: int
    confusion: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    numLeftOut: int
    _scored: npt.NDArray[np.float64] | None = field(default=None)
    """Of two classes: weights of the first and of the second class, shape ``(2, scores)``, by descending score."""
    _spark: SparkSession | None = field(default=None)

    @property
    def accuracy(self) -> float:
        """Share of the rows whose class is predicted."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def precisionByLabel(self) -> list[float]:
        """For each label, the share of its predictions that are correct; 0 for a label that is never predicted."""
        return _shares(np.diag(self.confusion), self.confusion.sum(axis=0))

    @property
    def recallByLabel(self) -> list[float]:
        """For each label, the share of its rows that are predicted correctly; 0 for a label that no row has."""
        return _shares(np.diag(self.confusion), self.confusion.sum(axis=1))

    def fMeasureByLabel(self, beta: float = 1.0) -> list[float]:
        """Return for each label the weighted harmonic mean of precision and recall; recall counts ``beta`` times."""
        square = beta * beta
        return [
            (1 + square) * precision * recall / (square * precision + recall) if precision + recall else 0.0
            for precision, recall in zip(self.precisionByLabel, self.recallByLabel, strict=True)
        ]

    def _average(self, by_label: Sequence[float]) -> float:
        return float(np.average(by_label, weights=self.confusion.sum(axis=1)))

    @property
    def weightedPrecision(self) -> float:
        """Mean of the labels' precisions, weighted by their numbers of rows."""
        return self._average(self.precisionByLabel)

    @property
    def weightedRecall(self) -> float:
        """Mean of the labels' recalls, weighted by their numbers of rows; equal to the accuracy."""
        return self._average(self.recallByLabel)

    def weightedFMeasure(self, beta: float = 1.0) -> float:
        """Return the mean of the labels' F-measures, weighted by their numbers of rows."""
        return self._average(self.fMeasureByLabel(beta))

    @property
    def areaUnderROC(self) -> float:
        """Area under the ROC curve of two classes; NaN if a class has no rows."""
        return _area(self._curve("FPR", "TPR"))

    @property
    def areaUnderPR(self) -> float:
        """Area under the precision-recall curve of two classes, by trapezoids as in Spark ML."""
        return _area(self._curve("recall", "precision"))

    @property
    def roc(self) -> DataFrame:
        """The ROC curve of two classes: a DataFrame with the columns ``FPR`` and ``TPR``."""
        return self._frame("FPR", "TPR")

    @property
    def pr(self) -> DataFrame:
        """The precision-recall curve of two classes: a DataFrame with the columns ``recall`` and ``precision``."""
        return self._frame("recall", "precision")

    def _frame(self, *names: str) -> DataFrame:
        assert self._spark is not None, "evaluate() sets it"
        return self._spark.createDataFrame(
            self._curve(*names).tolist(), ", ".join(f"{name} double" for name in names)
        )

    def _curve(self, *names: str) -> npt.NDArray[np.float64]:
        """Return the points of a curve by descending score, shape ``(points, names)``.

        Raises:
            ParamError: if the model has not two classes with scores.
        """
        if self._scored is None:
            raise ParamError(
                f"There is no curve of {len(self.labels)} classes here: a curve needs two classes, and a model that "
                "has a score for each (rawPredictionCol)."
            )
        # Scores of rows that all have the weight 0 are no points of a curve.
        counted = self._scored[:, self._scored.any(axis=0)]
        false, true = np.cumsum(counted, axis=1).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            points = {
                "FPR": np.concatenate([[0.0], false / false[-1]]),
                "TPR": np.concatenate([[0.0], true / true[-1]]),
                "recall": np.concatenate([[0.0], true / true[-1]]),
                "precision": np.concatenate([[true[0] / (true[0] + false[0])], true / (true + false)]),
            }
        return np.stack([points[name] for name in names], axis=1)

    @property
    def metrics(self) -> dict[str, float]:
        """Accuracy, weighted precision, recall and F1, and for two classes the areas under both curves."""
        values = {
            "accuracy": self.accuracy,
            "weightedPrecision": self.weightedPrecision,
            "weightedRecall": self.weightedRecall,
            "f1": self.weightedFMeasure(),
        }
        if self._scored is not None:
            values |= {"areaUnderROC": self.areaUnderROC, "areaUnderPR": self.areaUnderPR}
        return values

    def __str__(self) -> str:
        """Return a text with the metrics, and with precision, recall and F1 of up to 20 labels."""
        head = f"{count_of(self.numInstances, 'row')}, {len(self.labels)} classes"
        head += f"; {self.numLeftOut:,} rows without label or prediction" if self.numLeftOut else ""
        width = max(5, *(len(str(label)) for label in self.labels[:20]))
        is_weighted = self.confusion.dtype != np.int64
        rows = [
            f"{'label'.ljust(width)}  precision  recall      f1  {'weight' if is_weighted else 'rows':>10}"
        ]
        for label, precision, recall, f1, count in zip(
            self.labels,
            self.precisionByLabel,
            self.recallByLabel,
            self.fMeasureByLabel(),
            self.confusion.sum(axis=1),
            strict=True,
        ):
            rows.append(
                f"{str(label).ljust(width)}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}  {count:10,.6g}"
            )
        more = [f"and {len(self.labels) - 20} more"] if len(self.labels) > 20 else []
        return "\n".join([head, "", super().__str__(), "", *rows[:21], *more])

    def plot(self) -> Figure:
        """Return a matplotlib figure of the confusion matrix, and for two classes of both curves.

        A notebook displays the figure; elsewhere use ``plot().savefig("test.png")``.

        Raises:
            ImportError: if matplotlib (the extra ``plot``) is not installed.
        """
        curves = {}
        if self._scored is not None:
            curves = {
                ("false positive rate", "true positive rate"): self._curve("FPR", "TPR"),
                ("recall", "precision"): self._curve("recall", "precision"),
            }
        figure: Figure = plots().plot_classes(self.confusion, self.labels, curves)
        return figure


@dataclass(frozen=True, kw_only=True, repr=False)
class RegressionEvaluation(ModelEvaluation):
    """How good predicted numbers are. ``print`` and notebooks show the metrics.

    Attributes:
        numInstances: number of rows that count.
        numLeftOut: number of rows without a label or without a prediction, which do not count.
        meanAbsoluteError: mean of the errors' absolute values, in the unit of the label.
        meanSquaredError: mean of the errors' squares.
        r2: share of the labels' variance that the predictions explain; NaN if all labels are equal.
    """

    numInstances: int
    numLeftOut: int
    meanAbsoluteError: float
    meanSquaredError: float
    r2: float

    @property
    def rootMeanSquaredError(self) -> float:
        """Root of the mean of the errors' squares, in the unit of the label."""
        return math.sqrt(self.meanSquaredError)

    @property
    def metrics(self) -> dict[str, float]:
        """Errors and R2."""
        return {
            "rootMeanSquaredError": self.rootMeanSquaredError,
            "meanAbsoluteError": self.meanAbsoluteError,
            "r2": self.r2,
        }


def evaluate(
    model: TorchModel, dataset: DataFrame, name: str | None
) -> ModelEvaluation | dict[str, ModelEvaluation]:
    """Evaluate a model; see :meth:`sparkdl.estimators.TorchModel.evaluate`."""
    check_frame(dataset, "evaluate")
    check_tables(dataset)
    outputs, labels = model.saved.signature.outputs, model.getLabelCols()
    if len(labels) != len(outputs):
        raise ParamError(
            f"Param labelCol names {count_of(len(labels), 'column')}, and the model has "
            f"{count_of(len(outputs), 'output')}: {list_names(output.name for output in outputs)}."
        )
    weight = model._weight_column()
    check_case(dataset, [*labels, *([weight] if weight else [])])
    if weight and weight not in dataset.columns:
        raise DataError(
            f"Param weightCol is {weight!r}, and the DataFrame has no such column. Add it, or call "
            "model.clear(model.weightCol), so that all rows count equally."
        )
    for output, label in zip(outputs, labels, strict=True):
        if label not in dataset.columns:
            raise missing_column_error(label, dataset.columns)
        if output.is_sequence or output.shape:
            made = "texts" if output.is_sequence else f"arrays of shape {output.shape}"
            raise ParamError(
                f"The model predicts {made} for {label!r}, and evaluate takes one class or one number per row. Compare "
                "them by a function of your own on transform's rows."
            )
    rows = _answers(model, dataset, labels, weight)
    evaluations: dict[str, ModelEvaluation] = {}
    with reading_job(dataset.sparkSession, "evaluating the model"), ExitStack() as stack:
        if len(outputs) > 1 or weight is not None:  # several jobs read the rows
            stack.callback(rows.persist().unpersist)
        for index, (output, label) in enumerate(zip(outputs, labels, strict=True)):
            columns = tuple(F.col(f"{part}{index}") for part in ("label", "prediction", "score"))
            of_label: Any = (
                _numbers(rows, *columns[:2]) if output.kind == "value" else _classes(rows, output, *columns)
            )
            if not of_label.numInstances:
                raise DataError(
                    f"None of {of_label.numLeftOut:,} rows has both a label in column {label!r} and a prediction."
                )
            evaluations[label] = of_label
    if name is not None and model.summary.run_id is not None:
        _log(model.summary.run_id, evaluations, name)
    return evaluations if len(outputs) > 1 else evaluations[labels[0]]


def _answers(model: TorchModel, dataset: DataFrame, labels: Sequence[str], weight: str | None) -> DataFrame:
    """Return the columns ``label0``, ``prediction0`` and ``score0`` of the first output, and so on, and ``weight``."""
    outputs = model.saved.signature.outputs
    kept = dict.fromkeys([*model.getFeaturesCols(), *labels, *([weight] if weight else [])])
    prediction, raw = f"_{model.uid}_prediction", f"_{model.uid}_raw"
    has_raw = any(has_scores(output) for output in outputs)
    scoring = model.copy().setParams(
        predictionCol=prediction,
        predictionType="auto",
        probabilityCol="",
        rawPredictionCol=raw if has_raw else "",
    )
    scored = scoring.transform(dataset.select(*map(quote, kept)))
    columns = []
    for index, (output, label) in enumerate(zip(outputs, labels, strict=True)):
        of_label = (lambda name, field=output.name: F.col(name)[field]) if len(outputs) > 1 else F.col
        columns += [
            label_of(dataset, label, output).alias(f"label{index}"),
            of_label(prediction).alias(f"prediction{index}"),
            (_score(of_label(raw), output) if is_scored(output) else F.lit(0.0)).alias(f"score{index}"),
        ]
    weights = F.col(quote(weight)).cast("double") if weight else F.lit(1).cast("bigint")
    return scored.select(*columns, weights.alias("weight"))


def label_of(dataset: DataFrame, name: str, output: ModelOutput) -> Column:
    """Return a column of labels in the type of the classes or numbers that an output predicts.

    It is null for NaN, and for a number below 0 where the classes are numbered, as losses ignore it.

    Raises:
        DataError: if the column holds strings, and the model predicts numbers; or arrays.
    """
    type_ = dataset.schema[name].dataType
    stored = stored_type(type_)
    if stored is not None and stored[2]:
        raise DataError(
            f"Column {name!r} holds {type_.simpleString()}, and the model predicts one class or one number per row. "
            "Make one of each array; of one-hot labels it is the position of the 1."
        )
    kind = value_type(output)
    label = F.col(quote(name)).cast(kind)
    if kind != "double":
        return label
    if stored == ("string", "object", 0):
        remedy = (
            "Cast the column to a number."
            if output.kind == "value" or output.classes is not None
            else "Say which string each number stands for: with labels=[...] where the model is made, by "
            "TorchModel.from_module or from_pretrained."
        )
        raise DataError(f"Column {name!r} holds strings, and the model predicts numbers. {remedy}")
    label = F.nanvl(label, F.lit(None).cast("double"))
    return F.when(label >= 0, label) if output.kind != "value" and output.classes is None else label


def is_scored(output: ModelOutput) -> bool:
    """Whether an output has, or may have, two classes with a score each."""
    return has_scores(output) and output.num_classes in (None, 2)


_SCORE_BITS = 14
_LARGEST_SCORE = 1e300  # in place of infinity, as of a logarithm of 0


def _score(raw: Column, output: ModelOutput) -> Column:
    """Return the score of the second of two classes, rounded to a mantissa of 14 bits: rows are counted by score."""
    scores = vector_to_array(raw)
    score = scores[1] - scores[0]
    if output.kind in ("binary_probability", "class_probability"):
        probability = F.greatest(F.least(scores[1], F.lit(1 - 1e-15)), F.lit(1e-300))
        score = F.log(probability / (1 - probability))
    score = F.greatest(F.least(score, F.lit(_LARGEST_SCORE)), F.lit(-_LARGEST_SCORE))
    unit = F.pow(F.lit(2.0), F.floor(F.log2(F.abs(score))) - _SCORE_BITS)
    return F.when(score == 0, 0.0).otherwise(F.round(score / unit) * unit)


def _classes(
    rows: DataFrame, output: ModelOutput, label: Column, prediction: Column, score: Column
) -> ClassificationEvaluation:
    weight = F.sum("weight").alias("weight")
    least = _least_weight(F.col("weight")).alias("least")
    counted = (
        rows.groupBy(label, prediction, score).agg(F.count(F.lit(1)).alias("rows"), weight, least).collect()
    )
    _check_weights(min((row["least"] for row in counted), default=None))
    complete = [row for row in counted if row[0] is not None and row[1] is not None]
    known = output.classes or tuple(range(output.num_classes or 2))
    strange = sorted({row[0] for row in complete} - set(known))  # as no training row has
    labels = (*known, *strange)
    if complete and output.classes and not any(row[0] in output.classes for row in complete):
        raise DataError(
            "No row has a label that is one of the model's classes: the column holds "
            f"{list_names(map(repr, strange))}, and the classes are {list_names(map(repr, known))}. Change the values "
            "of the column to those."
        )
    number_of = {value: number for number, value in enumerate(labels)}
    is_weighted = dict(rows.dtypes)["weight"] == "double"
    dtype: Any = np.float64 if is_weighted else np.int64
    confusion: npt.NDArray[Any] = np.zeros((len(labels), len(labels)), dtype)
    for row in complete:
        confusion[number_of[row[0]], number_of[row[1]]] += row["weight"]
    scored = None
    if is_scored(output) and len(labels) == 2:
        scores = sorted({row[2] for row in complete}, reverse=True)
        place = {value: number for number, value in enumerate(scores)}
        scored = np.zeros((2, len(scores)))
        for row in complete:
            scored[number_of[row[0]], place[row[2]]] += row["weight"]
    return ClassificationEvaluation(
        labels=labels,
        numInstances=sum(row["rows"] for row in complete),
        confusion=confusion,
        numLeftOut=sum(row["rows"] for row in counted) - sum(row["rows"] for row in complete),
        _scored=scored,
        _spark=rows.sparkSession,
    )


def _least_weight(weight: Column) -> Column:
    """Return the aggregate of the smallest row weight; below 0 for null, NaN or infinity."""
    number = weight.cast("double")
    is_invalid = number.isNull() | F.isnan(number) | (number == math.inf)
    return F.min(F.when(is_invalid, F.lit(-1)).otherwise(weight))


def _check_weights(least: float | None) -> None:
    """Check the smallest row weight; None without rows.

    Raises:
        DataError: if it is not a weight.
    """
    if least is not None and least < 0:
        raise row_weights_error("weightCol has null, NaN, infinity or negative numbers")


def _numbers(rows: DataFrame, label: Column, prediction: Column) -> RegressionEvaluation:
    error, weight = prediction - label, F.col("weight")
    labels = F.when(error.isNotNull(), label)
    total, count, least, weights, sum_of_labels, absolute, square, variance = rows.select(
        F.count(F.lit(1)),
        F.count(error),
        _least_weight(weight),
        F.sum(F.when(error.isNotNull(), weight)),
        F.sum(weight * labels),
        F.sum(weight * F.abs(error)),
        F.sum(weight * error * error),
        F.var_pop(labels),
    ).collect()[0]
    _check_weights(least)
    if weights and isinstance(weights, float):
        # Around the mean, as the difference of large squares would lose digits.
        distance = labels - F.lit(sum_of_labels / weights)
        variance = rows.select(F.sum(weight * distance * distance)).collect()[0][0] / weights
    return RegressionEvaluation(
        numInstances=count,
        numLeftOut=total - count,
        meanAbsoluteError=absolute / weights if weights else math.nan,
        meanSquaredError=square / weights if weights else math.nan,
        r2=1 - square / weights / variance if variance else math.nan,
    )


def _log(run_id: str, evaluations: dict[str, ModelEvaluation], name: str) -> None:
    """Log metrics, and pictures if matplotlib is installed, to the run of the fit."""
    metrics: dict[str, float] = {}
    files: dict[str, bytes] = {}
    for label, evaluation in evaluations.items():
        prefix = name if len(evaluations) == 1 else f"{name}_{label}"
        metrics |= {f"{prefix}_{metric}": value for metric, value in evaluation.metrics.items()}
        if isinstance(evaluation, ClassificationEvaluation):
            picture = io.BytesIO()
            try:
                evaluation.plot().savefig(picture, format="png", dpi=120)
            except ImportError:
                continue
            files[f"plots/{prefix}.png"] = picture.getvalue()
    add_to_run(run_id, metrics, files)


def _shares(parts: npt.NDArray[np.int64], wholes: npt.NDArray[np.int64]) -> list[float]:
    return [float(part / whole) if whole else 0.0 for part, whole in zip(parts, wholes, strict=True)]


def _area(points: npt.NDArray[np.float64]) -> float:
    """Return the area under a curve of points ``(x, y)``, by trapezoids."""
    x, y = points.T
    return float(((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum())
