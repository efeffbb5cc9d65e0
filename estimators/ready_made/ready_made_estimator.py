"""What all ready-made estimators have in common: fits, Param maps, saving. Runs on the *driver*."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from torch import nn

from sparkdl.estimators.fitting_estimator import FittingEstimator, M
from sparkdl.estimators.param_mixins import P
from sparkdl.estimators.ready_made.params import _ReadyMadeParams
from sparkdl.estimators.torch_estimator import TorchEstimator
from sparkdl.estimators.validation_split import split_rows
from sparkdl.training.update import AdamW

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.data import ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice
    from sparkdl.model.inputs import PrepareFunction
    from sparkdl.training.spec import AugmentFunction


@dataclass(frozen=True)
class MadeModel:
    """What a ready-made estimator makes of the rows.

    Attributes:
        network: to train.
        prepare: makes its inputs of the feature columns; None where it takes the columns as they are.
        loss: that it is trained with.
        augment: changes batches in training; None for no changes.
    """

    network: nn.Module
    prepare: PrepareFunction | None
    loss: nn.Module
    augment: AugmentFunction | None = None


class ReadyMadeEstimator(FittingEstimator[M], _ReadyMadeParams, MLReadable[Any], MLWritable):
    """A :class:`TorchEstimator` that makes its model itself, of what is in the rows."""

    def setFeaturesCol(self: P, value: str | Sequence[str]) -> P:
        """Set the feature column, or several."""
        return self._set(featuresCol=value)

    @abstractmethod
    def make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> MadeModel:
        """Make the network for rows that are written already.

        Args:
            dataset: all rows.
            training: those that are trained on, from which scales are learned; None for all.
            spark: whose executors may help to look at many rows; without it the driver does all.

        Raises:
            DataError: if the columns cannot be used.
        """

    def check_values(self) -> None:
        """Check what needs no data.

        Raises:
            ParamError: naming the Param, its value and what it may be.
        """
        self.check_ranges()
        self.params_of_fit().check_values()

    def params_of_fit(self) -> TorchEstimator:
        """Return the estimator that a fit goes by, which makes the model once the rows are there."""
        return _LearningEstimator(self)

    def write(self) -> MLWriter:
        """Return a writer: ``estimator.write().overwrite().save(path)``."""
        from sparkdl.estimators.persistence import ParamsWriter

        return ParamsWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return a reader; :meth:`load` is the shortcut."""
        from sparkdl.estimators.persistence import TorchEstimatorReader

        return TorchEstimatorReader(cls)


class _LearningEstimator(TorchEstimator):
    """Fits for a ready-made estimator, which makes the model once the rows are there."""

    def __init__(self, of: ReadyMadeEstimator[Any]) -> None:
        super().__init__(
            model=nn.Linear(1, 1),
            prepareFeatures=_not_learned,
            optimizer=AdamW(of.getLearningRate(), of.getWeightDecay()),
            loss=nn.Identity(),
        )
        of._copyValues(self)
        self._resetUid(of.uid)
        self._of = of

    def learn(self, dataset: ParquetDataset, spark: SparkSession | None = None) -> None:
        training, _ = split_rows(self, dataset)
        made = self._of.make(dataset, training, spark)
        self._set(model=made.network, prepareFeatures=made.prepare, loss=made.loss, augment=made.augment)

    def _keeps_decimals(self) -> bool:
        return False

    def further_params(self) -> dict[str, object]:
        given = self._of.extractParamMap()
        return {param.name: value for param, value in given.items() if not self.hasParam(param.name)}


def _not_learned(columns: dict[str, Any]) -> Any:
    raise AssertionError(f"what prepares {', '.join(columns)} is made of the rows first")
