"""The Spark ML interface of sparkdl: :class:`TorchEstimator`, ready-made estimators, and the models that they fit.

This package connects Spark, the launcher and the training. It runs on the *driver*, with these exceptions: predictions
(``scoring.udf``), packing (``ready_made.language_rows``) and counting words (``ready_made.text``) run on *executors*.
Ranks run :func:`sparkdl.training.remote.fit_on_rank.fit_on_rank`. Begin with ``torch_estimator``, and go on with
``fit``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.lazy import attributes, guest_names

if TYPE_CHECKING:
    from sparkdl.estimators.evaluation import ClassificationEvaluation, RegressionEvaluation
    from sparkdl.estimators.importances import FeatureImportances
    from sparkdl.estimators.learning_rate_search import LearningRates
    from sparkdl.estimators.ready_made.estimator import TorchClassificationModel, TorchRegressionModel
    from sparkdl.estimators.ready_made.images import ImageClassifier
    from sparkdl.estimators.ready_made.language import LanguageModel, LanguageModelModel
    from sparkdl.estimators.ready_made.language_evaluator import PerplexityEvaluator
    from sparkdl.estimators.ready_made.tabular import TorchClassifier, TorchRegressor
    from sparkdl.estimators.ready_made.text import TextClassifier
    from sparkdl.estimators.summary import TrainingSummary
    from sparkdl.estimators.torch_estimator import TorchEstimator
    from sparkdl.estimators.torch_model import TorchModel
    from sparkdl.training.callbacks import Callback, FitContext, TensorBoard, TorchProfiler

# Each name imports its module on first use: importing pyspark.ml and pandas takes more than half a second.
_MODULES = {
    "Callback": "sparkdl.training.callbacks",
    "ClassificationEvaluation": "sparkdl.estimators.evaluation",
    "FeatureImportances": "sparkdl.estimators.importances",
    "FitContext": "sparkdl.training.callbacks",
    "LearningRates": "sparkdl.estimators.learning_rate_search",
    "RegressionEvaluation": "sparkdl.estimators.evaluation",
    "TensorBoard": "sparkdl.training.callbacks",
    "TorchEstimator": "sparkdl.estimators.torch_estimator",
    "TorchModel": "sparkdl.estimators.torch_model",
    "TorchProfiler": "sparkdl.training.callbacks",
    "TrainingSummary": "sparkdl.estimators.summary",
    **guest_names(__name__),
}

__all__ = [
    "Callback",
    "ClassificationEvaluation",
    "FeatureImportances",
    "FitContext",
    "ImageClassifier",
    "LanguageModel",
    "LanguageModelModel",
    "LearningRates",
    "PerplexityEvaluator",
    "RegressionEvaluation",
    "TensorBoard",
    "TextClassifier",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchProfiler",
    "TorchRegressionModel",
    "TorchRegressor",
    "TrainingSummary",
]


__getattr__, __dir__ = attributes(__name__, _MODULES)
