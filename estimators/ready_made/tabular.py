"""Estimators for tables: columns of numbers and categories. Run on the *driver*; the training runs on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from pyspark.ml.regression import Regressor
from torch import nn

from sparkdl.errors import DataError
from sparkdl.estimators.fitting_estimator import M
from sparkdl.estimators.ready_made.models import TorchClassificationModel, TorchRegressionModel
from sparkdl.estimators.ready_made.params import HasTable, _ReadyMadeClassifierParams, out_of_range
from sparkdl.estimators.ready_made.ready_made_estimator import MadeModel, ReadyMadeEstimator
from sparkdl.estimators.ready_made.shared_arguments import SharedArguments, with_shared_arguments
from sparkdl.estimators.ready_made.table import Table, learn_table
from sparkdl.networks.initial_weights import seeded
from sparkdl.networks.standardization import StandardizedMSELoss
from sparkdl.networks.tabular import TabularNetwork

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice
    from sparkdl.estimators.label_mixins import Labels

TABLE_DEFAULTS = {"hiddenSizes": [128, 64], "categoricalCols": [], "dropout": 0.1}


class _TableEstimator(ReadyMadeEstimator[M], HasTable):
    """What both estimators for tables do."""

    def check_ranges(self) -> None:
        """Check what needs no data; see :meth:`check_values`."""
        super().check_ranges()
        if any(size < 1 for size in self.getHiddenSizes()):
            raise out_of_range(self, self.hiddenSizes)

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

    def _network(self, table: Table, *, num_outputs: int) -> MadeModel:
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
        return MadeModel(network, None if table.is_plain else table.inputs, loss)


@with_shared_arguments
class TorchClassifier(
    _TableEstimator[TorchClassificationModel],
    _ReadyMadeClassifierParams,
    Classifier[TorchClassificationModel],
):
    """Tells classes by the columns of a table, with a multilayer perceptron.

    Numbers are standardized by the mean and the deviation of the rows that are trained on, categories are embedded;
    one that was not there in training, at ``transform``, counts as none. ``fit`` reads the rows once on the driver to
    learn all that, and the labels again to count and check the classes; it returns a
    :class:`TorchClassificationModel`. Nulls are an error; ``pyspark.ml.feature.Imputer`` fills them.

    Args:
        featuresCol: column of numbers or vectors, or a list of columns of numbers, vectors and strings; default
            ``"features"``.
        categoricalCols: those of them whose integers stand for categories, as strings always do; default [], none.
        labelCol: column of classes: whole numbers from 0, as Spark ML has them, or strings, booleans or other integers,
            which are predicted as they are called; default ``"label"``.
        labels: what it calls the classes, in the order that they are to have, where rows may lack one, as in a fold of
            ``CrossValidator``, or need not be read to find them; default: those that the rows hold.
        hiddenSizes: width of each hidden layer; default [128, 64]. Without any the model is linear.
        dropout: share of the outputs of hidden layers that is dropped in training; default 0.1.
        learningRate: of AdamW; default 0.001.
        weightDecay: of AdamW; default 0.0001.
        batchSize: rows per rank and step; default 64.
        epochs: how often every row is visited; default 20.
        seed: of the first weights, the order of rows and of all random numbers during the fit; default 0.
        probabilityCol: column of the probabilities of the classes, a vector; default ``"probability"``.
        rawPredictionCol: column of their scores, a vector; default ``"rawPrediction"``.
        predictionType: type of predictionCol: ``"auto"`` (default), ``"double"`` or ``"long"`` for the number of the
            class where labels are strings, ``"array"`` or ``"vector"``.
    """

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | Sequence[str] | None = None,
        categoricalCols: Sequence[str] | None = None,
        labelCol: str | None = None,
        labels: Labels | None = None,
        hiddenSizes: Sequence[int] | None = None,
        dropout: float | None = None,
        learningRate: float | None = None,
        weightDecay: float | None = None,
        batchSize: int | None = None,
        epochs: int | None = None,
        seed: int | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
        predictionType: str | None = None,
        **shared: Unpack[SharedArguments],
    ) -> None:
        super().__init__()
        self._setDefault(**TABLE_DEFAULTS)
        self._set_arguments()

    def make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> MadeModel:
        """Make the network for rows; see :class:`ReadyMadeEstimator`."""
        num_classes = self._count_classes(dataset)
        return self._network(self._learn_table(dataset, training), num_outputs=num_classes)

    def model_class(self) -> type[TorchClassificationModel]:
        """Return the class of the models that fits return."""
        return TorchClassificationModel


@with_shared_arguments
class TorchRegressor(_TableEstimator[TorchRegressionModel], Regressor[TorchRegressionModel]):
    """Tells a number by the columns of a table, with a multilayer perceptron.

    Columns are taken as :class:`TorchClassifier` takes them; ``fit`` reads the rows once on the driver. The layers
    learn standardized labels, whose mean and deviation the model holds, by the mean squared error: the unit of the
    labels changes nothing but the losses that are told in it. ``fit`` returns a :class:`TorchRegressionModel`.

    Args:
        featuresCol: column of numbers or vectors, or a list of columns of numbers, vectors and strings; default
            ``"features"``.
        categoricalCols: those of them whose integers stand for categories, as strings always do; default [], none.
        labelCol: column of numbers; default ``"label"``.
        hiddenSizes: width of each hidden layer; default [128, 64]. Without any the model is linear.
        dropout: share of the outputs of hidden layers that is dropped in training; default 0.1.
        learningRate: of AdamW; default 0.001.
        weightDecay: of AdamW; default 0.0001.
        batchSize: rows per rank and step; default 64.
        epochs: how often every row is visited; default 20.
        seed: of the first weights, the order of rows and of all random numbers during the fit; default 0.
    """

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
        batchSize: int | None = None,
        epochs: int | None = None,
        seed: int | None = None,
        **shared: Unpack[SharedArguments],
    ) -> None:
        super().__init__()
        self._setDefault(**TABLE_DEFAULTS)
        self._set_arguments()

    def make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> MadeModel:
        """Make the network for rows; see :class:`ReadyMadeEstimator`."""
        name = self.getLabelCol()
        column = dataset.column(name)
        if column.kind != "number" or column.shape:
            held = f"arrays of {column.shape}" if column.shape else f"{column.kind} values"
            raise DataError(f"Column {name!r} holds {held}, and TorchRegressor tells one number per row.")
        return self._network(self._learn_table(dataset, training, label=name), num_outputs=1)

    def model_class(self) -> type[TorchRegressionModel]:
        """Return the class of the models that fits return."""
        return TorchRegressionModel
