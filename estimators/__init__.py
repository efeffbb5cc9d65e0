"""The Spark ML face of sparkdl: :class:`TorchEstimator` and the :class:`TorchModel` that it fits. Runs on the *driver*.

The only place where Spark, the launcher and the training meet.
"""

from __future__ import annotations

from sparkdl.estimators.summary import TrainingSummary
from sparkdl.estimators.torch_estimator import TorchEstimator
from sparkdl.estimators.torch_model import TorchModel
from sparkdl.training.callbacks import Callback, FitContext

__all__ = ["Callback", "FitContext", "TorchEstimator", "TorchModel", "TrainingSummary"]
