"""The ready-made estimators for tables: columns of numbers and categories.

The *driver* learns the scales of the numbers and the categories from the rows. The training runs on the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from pyspark.ml.param.shared import HasHandleInvalid
from pyspark.ml.regression import Regressor
from torch import nn

from sparkdl.data import ParquetFeed
from sparkdl.data.spark.columns import faults_error
from sparkdl.errors import DataError, ParamError, list_names
from sparkdl.estimators.fit.recipe import Recipe
from sparkdl.estimators.params.base import OneOf, to_integers, to_strings
from sparkdl.estimators.params.estimator import ClassArguments, SharedArguments
from sparkdl.estimators.params.inputs import HasFeatureColumns
from sparkdl.estimators.params.table import Entry, at_least, param, with_arguments
from sparkdl.estimators.ready_made.estimator import (
    ReadyMadeEstimator,
    TorchClassificationModel,
    TorchRegressionModel,
)
from sparkdl.estimators.ready_made.params import _ReadyMadeClassifierParams, _ReadyMadeParams, describe_kind
from sparkdl.estimators.torch_estimator import M
from sparkdl.networks.standardization import Moments, StandardizedMSELoss
from sparkdl.networks.tabular import (
    TabularInputs,
    TabularNetwork,
    find_offset,
    is_missing_category,
    join_columns,
)
from sparkdl.random_state import seeded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.dataset.row_choice import RowChoice


MOST_CATEGORIES = 100_000
_ROWS_AT_ONCE = 1 << 14
_MOST = float(np.finfo(np.float32).max)


def learn_table(
    dataset: ParquetDataset,
    features: Sequence[str],
    *,
    categorical: Sequence[str],
    training: RowChoice | None,
    label: str | None = None,
) -> tuple[TabularInputs, Moments, Moments]:
    """Learn from the rows of a table, in one pass over them.

    Args:
        dataset: dataset of all rows.
        features: names of the feature columns.
        categorical: names of the feature columns whose numbers stand for categories.
        training: training rows, the only rows that are used; None for all rows.
        label: name of the label column whose scale is learned; None if the labels are not numbers to predict.

    Returns:
        The function that converts the columns to the network's inputs, mean and standard deviation of the numbers, and
        those of the labels, which are empty if these are not numbers to predict.

    Raises:
        ParamError: if a categorical column is not a feature column.
        DataError: if a column holds values that a table cannot have, or numbers that are not finite.
    """
    unknown = [name for name in categorical if name not in features]
    if unknown:
        raise ParamError(
            f"Param categoricalCols names {list_names(unknown)}, which featuresCol does not. The feature columns are: "
            f"{list_names(features)}."
        )
    columns = [dataset.column(name) for name in features]
    faults = [fault for column in columns if (fault := fault_of(column, categorical))]
    if faults:
        raise faults_error(faults)
    names = [column.name for column in columns if column.kind == "string" or column.name in categorical]
    numeric = tuple(column.name for column in columns if column.kind == "number" and column.name not in names)
    inputs = TabularInputs(
        numeric=numeric,
        categories=dict.fromkeys(names, ()),
        times=tuple(column.name for column in columns if column.kind in ("date", "timestamp")),
    )
    imputes = any(column.takes_nulls for column in columns)
    scales, label_scale = Moments(), Moments()
    categories_of: dict[str, set[Any]] = {name: set() for name in names}
    null_categories: set[str] = set()
    bad_features: dict[str, None] = {}
    bad_labels: dict[str, None] = {}
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
                first = {name: find_offset(batch[name]) for name in numeric}
                origins = tuple((name, origin) for name, origin in first.items() if origin)
                inputs = replace(inputs, origins=origins)
            if numeric or inputs.times:
                numbers = inputs.numbers(batch)
                if bad := _not_finite(numbers, numeric, batch, allow_nan=imputes):
                    bad_features |= dict.fromkeys(bad)
                else:
                    scales.add(numbers)
            if label is not None:
                labels = join_columns(batch, (label,), {})
                if bad := _not_finite(labels, (label,), batch):
                    bad_labels |= dict.fromkeys(bad)
                else:
                    label_scale.add(labels)
            for name, categories in categories_of.items():
                is_missing = is_missing_category(batch[name])
                if is_missing.any():
                    null_categories.add(name)
                _add_categories(categories, batch[name][~is_missing], name)
    _check_finite(bad_features, bad_labels, imputes=imputes)
    inputs = replace(
        inputs,
        categories={name: tuple(sorted(values)) for name, values in categories_of.items()},
        null_categories=tuple(name for name in names if name in null_categories),
    )
    return inputs, scales, label_scale


def fault_of(column: Column, categorical: Sequence[str]) -> str:
    """Return what is wrong with a feature column of a table, and what to do; empty if it can be used.

    Args:
        column: the column; without ``shape`` and ``lengths`` if only its type is known.
        categorical: names of the columns whose numbers stand for categories.
    """
    is_category = column.kind == "string" or column.name in categorical
    is_float = "float" in column.dtype and not column.takes_nulls
    if is_category and (column.shape or column.kind not in ("number", "string") or is_float):
        held = describe_kind(column) if column.shape else f"{column.kind} of {column.dtype}"
        remedy = (
            " Cast whole numbers to bigint; decimals are taken as doubles." if "float" in column.dtype else ""
        )
        return (
            f"Column {column.name!r} is to hold categories, and it holds {held}. Categories are strings or integers."
            f"{remedy}"
        )
    is_time = column.kind in ("date", "timestamp") and not column.shape
    if is_category or is_time or column.kind == "number":
        return ""
    if column.kind == "ragged":
        return f"Column {column.name!r} has arrays that differ in length, or empty ones. Bring them to one length."
    return (
        f"Column {column.name!r} holds {describe_kind(column)}. Cast them to numbers, or to strings that are "
        "categories."
    )


def _not_finite(
    values: npt.NDArray[np.float64],
    names: tuple[str, ...],
    batch: dict[str, npt.NDArray[Any]],
    *,
    allow_nan: bool = False,
) -> list[str]:
    """Return the names of the columns with numbers that are not finite in float32; NaN may be allowed."""

    def are_valid(numbers: npt.NDArray[np.float64]) -> bool:
        return bool(((np.abs(numbers) <= _MOST) | (allow_nan & np.isnan(numbers))).all())

    if are_valid(values):
        return []
    return [name for name in names if not are_valid(batch[name].astype(np.float64))] or [*names]


def _check_finite(features: Collection[str], labels: Collection[str], *, imputes: bool) -> None:
    """Check that no column among features and labels has numbers that are not finite.

    Raises:
        DataError: if there are any; the message names all of them.
    """
    held = "NaN or infinity"
    remedy = (
        "Fill them with pyspark.ml.feature.Imputer, set handleInvalid to 'impute', or leave those rows out."
    )
    if imputes:
        held, remedy = "infinity", "Leave those rows out, or set the values to null."
    of_labels = (labels, "NaN or infinity", "Leave those rows out.")
    faults = [
        f"Columns of numbers hold {held}, or numbers too large for float32: {list_names(map(repr, names))}. {remedy}"
        for names, held, remedy in ((features, held, remedy), of_labels)
        if names
    ]
    if faults:
        raise faults_error(faults)


def _add_categories(categories: set[Any], values: npt.NDArray[Any], name: str) -> None:
    if values.dtype.kind == "f":  # integers with nulls
        values = values.astype(np.int64)
    categories.update(values.tolist() if values.dtype == object else np.unique(values).tolist())
    if len(categories) > MOST_CATEGORIES:
        raise DataError(
            f"Column {name!r} holds more than {MOST_CATEGORIES} different categories. Hash them to fewer, for instance "
            "with F.abs(F.hash(column)) % 1000."
        )


class HasTable(HasHandleInvalid):
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
    handleInvalid = Entry(
        OneOf("error", "impute"),
        "what to do with null and NaN among the features: error, or impute",
        default="error",
        more='``"impute"`` replaces missing numbers by their mean over the training rows and gives the network a '
        "further number that says whether the value is missing, if training rows lack it; null among categories is a "
        "category of its own. ``transform`` and served models do the same.",
    )
    setHandleInvalid = handleInvalid.setter()


class _TableEstimator(ReadyMadeEstimator[M], HasTable):
    """Base of both estimators for tables."""

    featuresCol = HasFeatureColumns.featuresCol.reword(
        "column of numbers or vectors, or list of columns of numbers, vectors, strings, dates and timestamps"
    )
    _vector_dtype = "float64"  # vectors are standardized before they are rounded to the layers' float32

    def _nulls(self) -> dict[str, Any]:
        """Return the value in place of nulls, by feature column; see :meth:`sparkdl.data.Column.with_nulls`."""
        return dict.fromkeys(self.getFeaturesCols()) if self.getHandleInvalid() == "impute" else {}

    def _feature_fault(self, column: Column) -> str:
        """Return what is wrong with the type of a feature column; see :func:`fault_of`."""
        return fault_of(column, self.getCategoricalCols())

    def _make_network(
        self,
        dataset: ParquetDataset,
        training: RowChoice | None,
        *,
        num_outputs: int,
        label: str | None = None,
    ) -> Recipe:
        """Make the network for rows, and for numbers in the column ``label``, or for classes if that is None."""
        columns = [dataset.column(name) for name in self.getFeaturesCols()]
        inputs, scales, labels = learn_table(
            dataset,
            self.getFeaturesCols(),
            categorical=self.getCategoricalCols(),
            training=training,
            label=label,
        )
        is_regression = label is not None
        mean = labels.mean.item() if is_regression else 0.0
        deviation = labels.deviation.item() if is_regression else 1.0
        with seeded(self.getSeed()):
            network = TabularNetwork(
                mean=scales.mean,
                deviation=scales.deviation,
                num_categories=inputs.num_categories,
                hidden_sizes=self.getHiddenSizes(),
                dropout=self.getDropout(),
                num_outputs=num_outputs,
                output_mean=mean,
                output_deviation=deviation,
                imputes=any(column.takes_nulls for column in columns),
                # Positions of the numbers that some training rows lack.
                indicators=np.flatnonzero(scales.counts < scales.num_rows).tolist(),
            )
        loss = StandardizedMSELoss(deviation) if is_regression else nn.CrossEntropyLoss()
        # The network takes a single column of floats without conversion.
        is_plain = len(columns) == 1 and bool(inputs.numeric) and "float" in columns[0].dtype
        prepare = None if is_plain else inputs
        return Recipe(network, prepare, loss, num_classes=None if is_regression else num_outputs)


@with_arguments
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
    returns a :class:`TorchClassificationModel`. Dates and timestamps become numbers: the time of the day, of the week
    and of the year, and the seconds since 1970.
    """

    _model_class = TorchClassificationModel

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | Sequence[str] | None = None,
        categoricalCols: Sequence[str] | None = None,
        handleInvalid: str | None = None,
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
        return self._make_network(dataset, training, num_outputs=self._count_classes(dataset))


@with_arguments
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

    labelCol = _ReadyMadeParams.labelCol.reword("column of numbers")
    _model_class = TorchRegressionModel
    _own_defaults: ClassVar[Mapping[str, Any]] = {"metrics": ["rmse", "r2"]}
    _label_kinds = ("number",)

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | Sequence[str] | None = None,
        categoricalCols: Sequence[str] | None = None,
        handleInvalid: str | None = None,
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
        return self._make_network(dataset, training, num_outputs=1, label=self.getLabelCol())
