"""How much a model's predictions rely on each feature: ``TorchModel.featureImportances``.

One feature after the other is shuffled among the rows, and the score of the predictions gets worse by what the model
takes from it (Breiman, "Random Forests", 2001; Fisher, Rudin and Dominici, "All Models are Wrong, but Many are
Useful", 2019). Spark draws the rows; the driver predicts them.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pyspark.sql import functions as F

from sparkdl.checks import check_counts, check_integer
from sparkdl.data import ParquetFeed
from sparkdl.data.dataset.dataset import missing_column_error, row_weights_error
from sparkdl.data.spark.columns import check_case, check_frame, quote
from sparkdl.data.spark.input_files import check_tables
from sparkdl.data.spark.materialization import describe_first_rows
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.evaluation import ClassificationEvaluation, RegressionEvaluation, is_scored, label_of
from sparkdl.estimators.summary import ShownAsText, plots
from sparkdl.model.heads import class_numbers
from sparkdl.model.predictor import Answer, Predictor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from matplotlib.figure import Figure
    from pyspark.sql import DataFrame

    from sparkdl.data import Column
    from sparkdl.estimators.evaluation import ModelEvaluation
    from sparkdl.estimators.torch_model import TorchModel
    from sparkdl.model.signature import ModelOutput


_MOST_SHOWN = 30
_ERRORS = ("rootMeanSquaredError", "meanAbsoluteError")
"""Metrics that are better if they are smaller."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FeatureImportances(ShownAsText):
    """How much worse a score is if a feature is shuffled. ``print`` and notebooks show the most important features.

    Attributes:
        names: names of the features: those of the columns, and ``column[index]`` for elements of vectors and arrays.
        means: mean fall of the score by feature; if the score is an error, its mean rise.
        deviations: standard deviation of that over the repetitions, by feature.
        score: score of the unchanged rows.
        metric: name of the score, such as ``accuracy``.
        numInstances: number of rows.
    """

    names: tuple[str, ...]
    means: npt.NDArray[np.float64]
    deviations: npt.NDArray[np.float64]
    score: float
    metric: str
    numInstances: int

    @property
    def _change(self) -> str:
        return f"{'rise' if self.metric in _ERRORS else 'fall'} of {self.metric}"

    @property
    def order(self) -> list[int]:
        """Positions of the features, the most important one first."""
        return [int(index) for index in np.argsort(-self.means, kind="stable")]

    def __str__(self) -> str:
        """Return a text with a line per feature, the most important one first, for up to 30 features."""
        shown = self.order[:_MOST_SHOWN]
        width = max(len("feature"), *(len(self.names[index]) for index in shown))
        lines = [
            f"{self.numInstances:,} rows, {self.metric} {self.score:.4f}",
            "",
            f"{'feature'.ljust(width)}  {self._change} if shuffled",
        ]
        lines += [
            f"{self.names[index].ljust(width)}  {self.means[index]:8.4f} +- {self.deviations[index]:.4f}"
            for index in shown
        ]
        more = len(self.names) - len(shown)
        return "\n".join([*lines, *([f"and {more} more"] if more else [])])

    def plot(self) -> Figure:
        """Return a matplotlib figure of the 30 most important features.

        Raises:
            ImportError: if matplotlib (the extra ``plot``) is not installed.
        """
        shown = self.order[:_MOST_SHOWN]
        figure: Figure = plots().plot_bars(
            [self.names[index] for index in shown],
            self.means[shown],
            self.deviations[shown],
            f"{self._change} ({self.score:.4g}) if the feature is shuffled",
        )
        return figure


def measure_importances(
    model: TorchModel, dataset: DataFrame, *, metric: str | None, num_rows: int, num_repeats: int, seed: int
) -> FeatureImportances:
    """Measure the importances; see :meth:`sparkdl.estimators.TorchModel.featureImportances`."""
    check_frame(dataset, "featureImportances")
    check_tables(dataset)
    check_counts(least=1, num_rows=num_rows, num_repeats=num_repeats)
    check_integer(seed=seed)
    saved, names = model.saved, model.getLabelCols()
    outputs = saved.signature.outputs
    if len(outputs) != 1 or len(names) != 1 or outputs[0].is_sequence or outputs[0].shape:
        raise ParamError("featureImportances takes a model that predicts one class or one number per row.")
    (output,), (label,) = outputs, names
    weight = model._weight_column()
    read = [label, *([weight] if weight else [])]
    check_case(dataset, read)
    for name in read:
        if name not in dataset.columns:
            raise missing_column_error(name, dataset.columns)
    features, labels, weights = _draw_rows(model, dataset, label, weight, num_rows=num_rows, seed=seed)
    predictor = Predictor(saved)
    _, without = predictor.answer_complete(features, ("prediction",))
    counted = np.ones(len(labels), bool) if without is None else ~without
    inputs = {name: array[counted] for name, array in features.items()}
    labels, weights = labels[counted], None if weights is None else weights[counted]
    if not len(labels):
        raise DataError("No row has both a label and features that the model can predict.")
    if weights is not None and not ((weights >= 0) & np.isfinite(weights)).all():
        raise row_weights_error("weightCol has NaN, infinity or negative numbers")
    labels = class_numbers(labels, output.classes, label) if output.classes is not None else labels
    labels = labels.astype(np.float64)

    name = metric or ("r2" if output.kind == "value" else "accuracy")
    wanted: tuple[Answer, ...] = ("prediction", "rawPrediction") if is_scored(output) else ("prediction",)

    def score_of(changed: Mapping[str, npt.NDArray[Any]]) -> float:
        scores = _evaluation(predictor.answer(changed, wanted)[output.name], labels, weights, output).metrics
        if name not in scores:
            raise ParamError(f"metric is {name!r}, and this model has {', '.join(scores)}.")
        return scores[name]

    score, sign = score_of(inputs), -1 if name in _ERRORS else 1
    if np.isnan(score):
        raise DataError(
            f"{name} of {len(labels):,} drawn rows is NaN, as all of them have the same label. Raise num_rows."
        )
    units = list(_units(saved.signature.inputs.columns))
    falls = np.zeros((len(units), num_repeats))
    for number, (_, column, element) in enumerate(units):
        for repeat in range(num_repeats):
            order = np.random.default_rng([seed, number, repeat]).permutation(len(labels))
            shuffled = _reorder(inputs[column], element, order)
            falls[number, repeat] = sign * (score - score_of(inputs | {column: shuffled}))
    return FeatureImportances(
        names=tuple(name for name, _, _ in units),
        means=falls.mean(axis=1),
        deviations=falls.std(axis=1),
        score=score,
        metric=name,
        numInstances=len(labels),
    )


def _draw_rows(
    model: TorchModel, dataset: DataFrame, label: str, weight: str | None, *, num_rows: int, seed: int
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[Any], npt.NDArray[np.float64] | None]:
    """Return features of random rows, by the names of the model's columns, their labels, and their weights or None.

    They are rows that ``evaluate`` counts: those that have a label, and features as ``transform`` takes them.
    """
    trained, (output,) = model.saved.signature.inputs.columns, model.saved.signature.outputs
    names = model.getFeaturesCols()
    labels, weights = (f"_{model.uid}_{what}" for what in ("label", "weight"))
    others = [label_of(dataset, label, output).alias(labels)]
    others += [F.col(quote(weight)).cast("double").alias(weights)] if weight else []
    rows = model._select_features(dataset, *others)
    nullable = [name for name, column in zip(names, trained, strict=True) if column.takes_nulls]
    with tempfile.TemporaryDirectory(prefix="sparkdl-importances-") as folder:
        described = describe_first_rows(
            rows.orderBy(F.rand(seed)),
            rows.columns,
            folder,
            num_rows=num_rows,
            vector_dtype="float64",
            allow_ragged=True,
            nullable=nullable,
        ).with_nulls(dict.fromkeys(nullable))
        with ParquetFeed(described, batch_size=num_rows, shuffle=False) as feed:
            (values,) = [{name: np.array(array) for name, array in batch.items()} for batch in feed.epoch(0)]
    features = {column.name: values[name] for name, column in zip(names, trained, strict=True)}
    return features, values[labels], values[weights] if weight else None


def _reorder(values: npt.NDArray[Any], element: int | None, order: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """Return values whose rows, or one element of each, come from other rows."""
    if element is None:
        return values[order]
    reordered = values.copy()
    reordered[:, element] = values[order, element]
    return reordered


def _units(columns: tuple[Column, ...]) -> Iterator[tuple[str, str, int | None]]:
    """Yield what is shuffled at once: its name, its column, and the position inside of an array, None for all of it."""
    for column in columns:
        if len(column.shape) == 1:
            for element in range(column.shape[0]):
                yield f"{column.name}[{element}]", column.name, element
        else:
            yield column.name, column.name, None


def _evaluation(
    answers: Mapping[Answer, npt.NDArray[np.float64]],
    labels: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64] | None,
    output: ModelOutput,
) -> ModelEvaluation:
    """Compare answers with labels, which are numbers or the numbers of classes; ``weights`` are those of the rows."""
    predictions, count = answers["prediction"], len(labels)
    if output.kind == "value":
        errors = predictions - labels
        square = np.average(errors**2, weights=weights)
        variance = np.average((labels - np.average(labels, weights=weights)) ** 2, weights=weights)
        return RegressionEvaluation(
            numInstances=count,
            numLeftOut=0,
            meanAbsoluteError=float(np.average(np.abs(errors), weights=weights)),
            meanSquaredError=float(square),
            r2=float(1 - square / variance) if variance else float("nan"),
        )
    known, numbers = np.unique(np.stack([labels, predictions]), return_inverse=True)
    confusion: npt.NDArray[Any] = np.zeros((len(known), len(known)))
    np.add.at(confusion, tuple(numbers.reshape(2, count)), 1.0 if weights is None else weights)
    scored = None
    if "rawPrediction" in answers and {*labels} <= {0, 1}:
        descending, places = np.unique(np.diff(-answers["rawPrediction"]), return_inverse=True)
        scored = np.zeros((2, len(descending)))
        np.add.at(scored, (labels.astype(int), places.ravel()), 1.0 if weights is None else weights)
    return ClassificationEvaluation(
        labels=tuple(known), numInstances=count, confusion=confusion, numLeftOut=0, _scored=scored
    )
