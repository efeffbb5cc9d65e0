"""The base of all ready-made estimators, predictions for one row, and the models that the estimators return.

The base implements what all ready-made estimators have in common: fits, Param maps, saving. Predictions for one row
need no DataFrame, as in models of Spark ML, and run anywhere. The models run on the *driver*; their predictions for a
DataFrame run on the *executors*.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pyspark.ml.classification import ClassificationModel
from pyspark.ml.regression import RegressionModel

from sparkdl.data.dataset.arrow import IMAGE_FIELDS
from sparkdl.data.dataset.dataset import missing_column_error
from sparkdl.errors import DataError, ParamError, list_names
from sparkdl.estimators.fit.recipe import Recipe
from sparkdl.estimators.fit.split import split_rows
from sparkdl.estimators.params.inputs import HasFeatureColumns
from sparkdl.estimators.params.table import check_entries
from sparkdl.estimators.params.training import metrics_by_name
from sparkdl.estimators.persistence import SavedInFolder
from sparkdl.estimators.ready_made.params import _ReadyMadeParams, describe_kind
from sparkdl.estimators.torch_estimator import FittingEstimator, M, TorchEstimator
from sparkdl.estimators.torch_model import TorchModel
from sparkdl.model.decisions import to_label_values
from sparkdl.model.inputs import rectangular_array
from sparkdl.model.named_metrics import OF_CLASSES
from sparkdl.model.predictor import Answer, Predictor
from sparkdl.networks.tabular import TabularInputs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.dataset.row_choice import RowChoice
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.estimators.summary import TrainingSummary
    from sparkdl.model.saved_model import SavedModel


class ReadyMadeEstimator(FittingEstimator[M], _ReadyMadeParams, SavedInFolder[Any]):
    """Base of estimators that make their model themselves, from the content of the rows."""

    _learns = True
    _vector_dtype = "float32"
    _own_defaults: ClassVar[Mapping[str, Any]] = {"metrics": list(OF_CLASSES)}
    _label_kinds: ClassVar[tuple[str, ...]] = ("number", "string")
    """Kinds of values that the label column may hold."""

    setFeaturesCol = HasFeatureColumns.setFeaturesCol

    @abstractmethod
    def _make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> Recipe:
        """Make the model for rows that are already written, and its loss; :meth:`_learn` adds the metrics.

        Args:
            dataset: dataset of all rows.
            training: training rows, from which scales are learned; None for all rows.
            spark: session whose executors may read many rows; None to read all rows on the driver.

        Raises:
            DataError: if the columns cannot be used.
        """

    def _check_values(self) -> None:
        """Check all Params, as far as that needs no data.

        Raises:
            ParamError: if a value cannot work; the message names the Param, its value and what it may be.
        """
        check_entries(self)
        self._params_of_fit()._check_settings()

    def _params_of_fit(self) -> TorchEstimator:
        """Return the estimator that runs the fit, without a model: :meth:`_learn` makes it from the written rows."""
        params = TorchEstimator(
            optimizer=partial(
                torch.optim.AdamW, lr=self.getLearningRate(), weight_decay=self.getWeightDecay()
            ),
        )
        self._copyValues(params)
        params._resetUid(self.uid)
        params._made_for = self
        return params

    def _learn(
        self, params: _TorchEstimatorParams, dataset: ParquetDataset, spark: SparkSession | None
    ) -> Recipe:
        """Return the model that is made for the rows, its loss and metrics."""
        training, _ = split_rows(params, dataset)
        recipe = self._make(dataset, training, spark)
        metrics = self.getOrDefault(self.metrics)
        if not self.isSet(self.metrics) and recipe.num_classes not in (None, 2):
            if (self.getBestMetric() or "").removeprefix("val_") == "auroc":
                raise ParamError(
                    f"Param bestMetric is {self.getBestMetric()!r}, and there are {recipe.num_classes} classes: the "
                    "AUROC of more than two is computed by torchmetrics, if metrics=['auroc'] asks for it."
                ).about("bestMetric", "metrics")
            metrics = [name for name in metrics if name != "auroc"]
        return replace(recipe, metrics=metrics_by_name(metrics))

    @abstractmethod
    def _feature_fault(self, column: Column) -> str:
        """Return what is wrong with the type of a feature column, and what to do; empty if it can be used."""

    def _faults(self, features: Sequence[Column], labels: Sequence[Column]) -> Iterator[str]:
        """Yield what is wrong with the types of columns, whose shapes are not known yet."""
        yield from filter(None, map(self._feature_fault, features))
        for column in labels:
            if column.shape or column.kind not in self._label_kinds:
                yield (
                    f"Column {column.name!r} holds {describe_kind(column)}, and {type(self).__name__} takes one "
                    f"{' or '.join(self._label_kinds)} per row as label."
                )

    def _make_model(self, saved: SavedModel, summary: TrainingSummary) -> M:
        if self.hasParam("loraRank") and self.isSet("loraRank"):
            from sparkdl.networks.adapters import merge_adapters  # needed by few fits

            merge_adapters(saved.module)
        return super()._make_model(saved, summary)


_IMAGE = (
    f"a row of Spark's image source ({', '.join(IMAGE_FIELDS)}), or an array of height, width and channels"
)


def answer_row(saved: SavedModel, value: Any, answer: Answer) -> Any:
    """Return the prediction for one row, or a Spark ML vector of its probabilities or scores, with an entry per class.

    Args:
        saved: the model.
        value: features of the row: the value of the feature column, or a dict or a Spark Row of the feature columns,
            which may have further columns.
        answer: whether to return the prediction, the probabilities or the class scores.

    Raises:
        DataError: if a feature column is missing, null, of another shape than in training, or of an unsuitable type.
    """
    from pyspark.ml.linalg import Vectors

    columns = saved.signature.inputs.columns
    values = _by_name(value, columns)
    for column in columns:
        if column.name not in values:
            raise missing_column_error(column.name, list(values))
    row = {column.name: _one(values[column.name], column) for column in columns}
    (output,) = saved.signature.outputs
    (answers,) = Predictor(saved, batch_size=1).answer(row, (answer,)).values()
    if answer == "prediction":
        value = to_label_values(answers[answer], output)[0]
        return value.item() if output.classes is None else value
    return Vectors.dense(answers[answer][0])


def _by_name(value: Any, columns: tuple[Column, ...]) -> Mapping[str, Any]:
    """Return the features of a row by the names of their columns."""
    from pyspark.sql import Row

    named = value.asDict() if isinstance(value, Row) and hasattr(value, "__fields__") else value
    if len(columns) > 1:
        if not isinstance(named, Mapping):
            names = list_names(column.name for column in columns)
            raise DataError(
                f"The model takes several columns: give a dict of {names}, or a Row that has them, not "
                f"{type(value).__name__}."
            )
        return named
    (column,) = columns
    # A row of Spark's image source is the value of one column, even if it is a dict.
    if isinstance(named, Mapping) and (column.kind != "image" or column.name in named):
        return named
    return {column.name: value}


def _one(value: Any, column: Column) -> npt.NDArray[Any]:
    """Return a value as an array of one row; strings, bytes and images stay objects."""
    if value is None and not column.takes_nulls:
        raise DataError(
            f"Column {column.name!r} is null in this row, for which nothing can be predicted; transform gives null."
        )
    value = value.toArray() if hasattr(value, "toArray") else value
    if value is not None and column.kind in ("string", "binary", "image") and not column.shape:
        row = np.empty(1, dtype=object)
        row[0] = _object(value, column)
        return row
    if column.takes_nulls or (column.kind in ("date", "timestamp") and not column.shape):
        return _as_served(value, column)
    return _numbers(value, column)[None]


def _as_served(value: Any, column: Column) -> npt.NDArray[Any]:
    """Return a value as an array of one row, as served; instants of Spark rows are in the zone of this machine."""
    from sparkdl.model.served_columns import to_column_dtype  # with pandas, which other rows do without

    if isinstance(value, np.datetime64) and column.kind == "timestamp":
        value = int(value.astype("datetime64[us]").astype(np.int64))
    elif isinstance(value, datetime) and column.is_utc and value.tzinfo is None:
        value = value.astimezone()
    return to_column_dtype([value], column)


def _object(value: Any, column: Column) -> Any:
    if column.kind == "image":
        return _pixels(value, column)
    if column.kind == "string":
        if not isinstance(value, str):
            raise _wrong_value_error(value, column, "a string")
        return value
    if not isinstance(value, bytes | bytearray | memoryview):
        remedy = " Give what is in the file, not its path." if isinstance(value, str) else ""
        raise _wrong_value_error(value, column, "bytes", remedy)
    return bytes(value)  # Spark returns bytes as a bytearray


def _numbers(value: Any, column: Column) -> npt.NDArray[Any]:
    element, depth = (column.element[0], 1) if column.kind == "ragged" else (column.kind, len(column.shape))
    wanted = f"arrays of {element}s" if depth else f"a {element}"
    try:
        row = rectangular_array(value)
    except ValueError as error:  # arrays inside arrays that differ in length
        raise _wrong_value_error(value, column, wanted, f" {error}") from error
    if (
        element == "number"
        and row.dtype == object
        and all(isinstance(item, Decimal | Real) for item in row.flat)
    ):
        row = row.astype(np.float64)
    if element == "number" and row.dtype.kind not in "biuf":
        raise _wrong_value_error(value, column, wanted)
    return row


def _pixels(value: Any, column: Column) -> npt.NDArray[np.uint8]:
    """Return an image as an array, as the feed does, from a row of Spark's image source or from an array."""
    if isinstance(value, np.ndarray):
        return value
    try:
        shape = value["height"], value["width"], value["nChannels"]
        return np.frombuffer(value["data"], np.uint8).reshape(shape)
    except (TypeError, KeyError, ValueError) as error:  # a Row raises ValueError for a missing field
        is_row = isinstance(value, Mapping) or hasattr(value, "__fields__")
        reason = f" {type(error).__name__}: {error}" if is_row else ""
        raise _wrong_value_error(value, column, _IMAGE, reason) from error


def _wrong_value_error(value: Any, column: Column, wanted: str, more: str = "") -> DataError:
    return DataError(
        f"Column {column.name!r} takes {wanted}, as the model was trained on, not {type(value).__name__}.{more}"
    )


class _ReadyMadeModel(TorchModel):
    """Members of Spark ML's models in addition to ``transform``."""

    @property
    def numFeatures(self) -> int:
        """Number of features of a row: one for each number or category, and one for each element of an array.

        -1 for texts and for encoded images, which have no number of features.
        """
        inputs = self.saved.signature.inputs
        is_table = isinstance(inputs.prepare, TabularInputs)
        if any(column.kind != "number" and not is_table for column in inputs.columns):
            return -1
        return sum(math.prod(column.shape) for column in inputs.columns)

    def predict(self, value: Any) -> Any:
        """Return the prediction for one row: the value of its feature column, or a dict or Row of the columns."""
        return answer_row(self.saved, value, "prediction")

    setFeaturesCol = HasFeatureColumns.setFeaturesCol


class TorchClassificationModel(_ReadyMadeModel, ClassificationModel):
    """The model of :class:`TorchClassifier`: a :class:`TorchModel` that is a ``ClassificationModel`` of Spark ML.

    ``transform`` adds ``probabilityCol`` and ``rawPredictionCol`` in addition to ``predictionCol``, as evaluators and
    ``OneVsRest`` need them.
    """

    @property
    def numClasses(self) -> int:
        """Number of classes."""
        count = self.saved.signature.outputs[0].num_classes
        assert count is not None, "a classifier is trained with a loss over classes"
        return count

    def predictRaw(self, value: Any) -> Any:
        """Return the score of each class for one row, as a vector."""
        return answer_row(self.saved, value, "rawPrediction")

    def predictProbability(self, value: Any) -> Any:
        """Return the probability of each class for one row, as a vector."""
        return answer_row(self.saved, value, "probability")


class TorchRegressionModel(_ReadyMadeModel, RegressionModel[Any]):
    """The model of :class:`TorchRegressor`: a :class:`TorchModel` that is a ``RegressionModel`` of Spark ML."""
