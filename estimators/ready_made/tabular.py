"""The ready-made estimators for tables: columns of numbers and categories.

The *driver* learns the scales of the numbers and the categories from the rows. The training runs on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from pyspark.ml.param import Params
from pyspark.ml.regression import Regressor
from torch import nn

from sparkdl.data import ParquetFeed
from sparkdl.errors import DataError, ParamError, listed
from sparkdl.estimators.params.base import to_integers, to_strings
from sparkdl.estimators.params.estimator import ClassArguments, SharedArguments
from sparkdl.estimators.params.table import at_least, param, with_arguments
from sparkdl.estimators.ready_made.estimator import (
    ReadyMadeEstimator,
    Recipe,
    TorchClassificationModel,
    TorchRegressionModel,
)
from sparkdl.estimators.ready_made.params import _ReadyMadeClassifierParams
from sparkdl.estimators.torch_estimator import M
from sparkdl.networks.initial_weights import seeded
from sparkdl.networks.standardization import Moments, StandardizedMSELoss
from sparkdl.networks.tabular import TabularInputs, TabularNetwork, joined, origin_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.dataset.row_choice import RowChoice


MOST_CATEGORIES = 100_000
_ROWS_AT_ONCE = 1 << 14
_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Table:
    """The inputs and scales that are learned from the rows of a table.

    Attributes:
        inputs: function that converts the columns to the network's inputs.
        scales: mean and standard deviation of the numbers.
        label_scale: mean and standard deviation of the labels; empty if the labels are not numbers to predict.
        is_plain: whether the only feature column holds floats, so that the network can take it without conversion.
    """

    inputs: TabularInputs
    scales: Moments
    label_scale: Moments
    is_plain: bool


def learn_table(
    dataset: ParquetDataset,
    features: Sequence[str],
    *,
    categorical: Sequence[str],
    training: RowChoice | None,
    label: str | None = None,
) -> Table:
    """Learn the inputs and scales of a table in one pass over the rows.

    Args:
        dataset: dataset of all rows.
        features: names of the feature columns.
        categorical: names of the feature columns whose numbers stand for categories.
        training: training rows, the only rows that are used; None for all rows.
        label: name of the label column whose scale is learned; None if the labels are not numbers to predict.

    Raises:
        ParamError: if a categorical column is not a feature column.
        DataError: if a column holds values that a table cannot have, or numbers that are not finite.
    """
    unknown = [name for name in categorical if name not in features]
    if unknown:
        raise ParamError(
            f"Param categoricalCols names {listed(unknown)}, which featuresCol does not. The feature columns are: "
            f"{listed(features)}."
        )
    columns = [dataset.column(name) for name in features]
    names = [column.name for column in columns if column.kind == "string" or column.name in categorical]
    for column in columns:
        _check_kind(column, is_category=column.name in names)
    numeric = tuple(column.name for column in columns if column.name not in names)
    scales, label_scale = Moments(), Moments()
    categories_of: dict[str, set[Any]] = {name: set() for name in names}
    origins: dict[str, int] = {}
    wanted = [*features, *([label] if label is not None else [])]
    with ParquetFeed(
        dataset,
        columns=list(dict.fromkeys(wanted)),
        batch_size=_ROWS_AT_ONCE,
        shuffle=False,
        row_filter=training,
    ) as feed:
        for batch in feed.epoch(0):
            if not scales.num_rows:
                first = {name: origin_of(batch[name]) for name in numeric}
                origins = {name: origin for name, origin in first.items() if origin}
            if numeric:
                scales.add(_finite(joined(batch, numeric, origins), numeric, batch))
            if label is not None:
                labels = joined(batch, (label,), {})
                label_scale.add(_finite(labels, (label,), batch))
            for name, categories in categories_of.items():
                _add_categories(categories, batch[name], name)
    return Table(
        inputs=TabularInputs(
            numeric=numeric,
            categories={name: tuple(sorted(values)) for name, values in categories_of.items()},
            origins=tuple(origins.items()),
        ),
        scales=scales,
        label_scale=label_scale,
        is_plain=len(columns) == 1 and "float" in columns[0].dtype,
    )


def _check_kind(column: Column, *, is_category: bool) -> None:
    if is_category and (column.shape or column.kind not in ("number", "string") or "float" in column.dtype):
        held = f"arrays of {math.prod(column.shape)}" if column.shape else f"{column.kind} of {column.dtype}"
        remedy = (
            " Cast whole numbers to bigint; decimals are taken as doubles." if "float" in column.dtype else ""
        )
        raise DataError(
            f"Column {column.name!r} is to hold categories, and it holds {held}. Categories are strings or integers."
            f"{remedy}"
        )
    if not is_category and column.kind == "ragged":
        raise DataError(
            f"Column {column.name!r} has arrays that differ in length, or empty ones. Bring them to one length."
        )
    if not is_category and column.kind != "number":
        raise DataError(
            f"Column {column.name!r} holds {column.kind} values. Cast them to numbers, or to strings that are "
            "categories."
        )


def _finite(
    values: npt.NDArray[np.float64], names: tuple[str, ...], batch: dict[str, npt.NDArray[Any]]
) -> npt.NDArray[np.float64]:
    if (np.abs(values) <= _MOST).all():
        return values
    bad = [name for name in names if not (np.abs(batch[name].astype(np.float64)) <= _MOST).all()]
    raise DataError(
        f"Columns of numbers hold NaN or infinity, or what is too large for float32: {listed(map(repr, bad))}. Fill "
        "them with pyspark.ml.feature.Imputer, or leave those rows out."
    )


def _add_categories(categories: set[Any], values: npt.NDArray[Any], name: str) -> None:
    categories.update(values.tolist() if values.dtype == object else np.unique(values).tolist())
    if len(categories) > MOST_CATEGORIES:
        raise DataError(
            f"Column {name!r} holds more than {MOST_CATEGORIES} different categories. Hash them to fewer, for instance "
            "with F.abs(F.hash(column)) % 1000."
        )


class HasTable(Params):
    """Params for the network of a table."""

    hiddenSizes, getHiddenSizes, setHiddenSizes = param(
        to_integers,
        "width of each hidden layer (> 0); an empty list for a linear model",
        default=[128, 64],
        check=at_least(1),
    )
    categoricalCols, getCategoricalCols, setCategoricalCols = param(
        to_strings,
        "list of the feature columns whose integers are categories; strings are always categories",
        default=[],
    )


_FEATURES = 'column of numbers or vectors, or list of columns of numbers, vectors and strings; default ``"features"``.'


class _TableEstimator(ReadyMadeEstimator[M], HasTable):
    """Base of both estimators for tables."""

    _vector_dtype = "float64"  # vectors are standardized before they are rounded to the layers' float32

    def _learn_table(
        self, dataset: ParquetDataset, training: RowChoice | None, *, label: str | None = None
    ) -> Table:
        return learn_table(
            dataset,
            self.getFeaturesCols(),
            categorical=self.getCategoricalCols(),
            training=training,
            label=label,
        )

    def _network(self, table: Table, *, num_outputs: int) -> Recipe:
        labels = table.label_scale
        is_regression = labels.num_rows > 0
        mean = labels.mean.item() if is_regression else 0.0
        deviation = labels.deviation.item() if is_regression else 1.0
        with seeded(self.getSeed()):
            network = TabularNetwork(
                mean=table.scales.mean,
                deviation=table.scales.deviation,
                num_categories=[len(known) for known in table.inputs.categories.values()],
                hidden_sizes=self.getHiddenSizes(),
                dropout=self.getDropout(),
                num_outputs=num_outputs,
                output_mean=mean,
                output_deviation=deviation,
            )
        loss = StandardizedMSELoss(deviation) if is_regression else nn.CrossEntropyLoss()
        inputs = None if table.is_plain else table.inputs
        return Recipe(network, inputs, loss, num_classes=None if is_regression else num_outputs)


@with_arguments(ClassArguments, featuresCol=_FEATURES)
class TorchClassifier(
    _TableEstimator[TorchClassificationModel],
    _ReadyMadeClassifierParams,
    Classifier[TorchClassificationModel],
):
    """Classifies the rows of a table with a multilayer perceptron.

    Example::

        classifier = TorchClassifier(featuresCol=["age", "city"], labelCol="bought", epochs=10, numWorkers=4)
        model = classifier.fit(train)
        print(model.evaluate(test).accuracy)
        model.transform(test).select("prediction", "probability").show()

    Numbers are standardized by the mean and the standard deviation of the training rows. Categories are embedded; in
    ``transform``, a category that the training rows do not contain is embedded as zeros. ``fit`` reads the rows once
    on the driver to learn the scales and categories, and reads the labels again to count and check the classes. It
    returns a :class:`TorchClassificationModel`. Nulls are an error; ``pyspark.ml.feature.Imputer`` fills them.
    """

    _model_class = TorchClassificationModel

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | Sequence[str] | None = None,
        categoricalCols: Sequence[str] | None = None,
        labelCol: str | None = None,
        hiddenSizes: Sequence[int] | None = None,
        dropout: float | None = None,
        learningRate: float | None = None,
        weightDecay: float | None = None,
        **params: Unpack[ClassArguments],
    ) -> None:
        super().__init__()
        self._set_arguments()

    def _make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> Recipe:
        """Make the network for rows; see :class:`ReadyMadeEstimator`."""
        num_classes = self._count_classes(dataset)
        return self._network(self._learn_table(dataset, training), num_outputs=num_classes)


@with_arguments(SharedArguments, featuresCol=_FEATURES, labelCol='column of numbers; default ``"label"``.')
class TorchRegressor(_TableEstimator[TorchRegressionModel], Regressor[TorchRegressionModel]):
    """Predicts a number for each row of a table with a multilayer perceptron.

    Example::

        model = TorchRegressor(featuresCol=["rooms", "district"], labelCol="price", numWorkers=4).fit(train)
        print(model.evaluate(test).rootMeanSquaredError)

    The feature columns are as for :class:`TorchClassifier`. ``fit`` reads the rows once on the driver. The layers learn
    standardized labels, with the mean squared error as the loss; the model holds the mean and the standard deviation of
    the labels. The unit of the labels thus changes only the losses, which are reported in the squared unit. ``fit``
    returns a :class:`TorchRegressionModel`.
    """

    _model_class = TorchRegressionModel
    _own_metrics = ("rmse", "r2")

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | Sequence[str] | None = None,
        categoricalCols: Sequence[str] | None = None,
        labelCol: str | None = None,
        hiddenSizes: Sequence[int] | None = None,
        dropout: float | None = None,
        learningRate: float | None = None,
        weightDecay: float | None = None,
        **params: Unpack[SharedArguments],
    ) -> None:
        super().__init__()
        self._set_arguments()

    def _make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> Recipe:
        """Make the network for rows; see :class:`ReadyMadeEstimator`."""
        name = self.getLabelCol()
        column = dataset.column(name)
        if column.kind != "number" or column.shape:
            held = f"arrays of {column.shape}" if column.shape else f"{column.kind} values"
            raise DataError(f"Column {name!r} holds {held}, and TorchRegressor predicts one number per row.")
        return self._network(self._learn_table(dataset, training, label=name), num_outputs=1)
