"""The models that ready-made estimators return. Run on the *driver*; their predictions run on the executors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pyspark.ml.classification import ClassificationModel
from pyspark.ml.regression import RegressionModel

from sparkdl.estimators.param_mixins import P
from sparkdl.estimators.ready_made.single_row import answer_row
from sparkdl.estimators.torch_model import TorchModel
from sparkdl.networks.tabular import TabularInputs


class _ReadyMadeModel(TorchModel):
    """What models of Spark ML tell beside ``transform``."""

    @property
    def numFeatures(self) -> int:
        """Features of a row: one for each scalar, number or category, and for each element of an array.

        -1 for texts and for encoded images, which have no number of features.
        """
        inputs = self.saved.signature.inputs
        is_table = isinstance(inputs.prepare, TabularInputs)
        if any(column.kind != "number" and not is_table for column in inputs.columns):
            return -1
        return sum(math.prod(column.shape) for column in inputs.columns)

    def predict(self, value: Any) -> Any:
        """Return the prediction for one row: its features, or by the names of the columns a dict or a Row of them."""
        return answer_row(self.saved, value, "prediction")

    def setFeaturesCol(self: P, value: str | Sequence[str]) -> P:
        """Set the feature column, or several."""
        return self._set(featuresCol=value)


class TorchClassificationModel(_ReadyMadeModel, ClassificationModel):
    """What :class:`TorchClassifier` returns: a :class:`TorchModel` that is a ``ClassificationModel`` of Spark ML.

    ``transform`` adds ``probabilityCol`` and ``rawPredictionCol`` beside ``predictionCol``, so that evaluators and
    ``OneVsRest`` take it.
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
    """What :class:`TorchRegressor` returns: a :class:`TorchModel` that is a ``RegressionModel`` of Spark ML."""
