"""The Spark ML face of sparkdl: :class:`TorchEstimator` and the :class:`TorchModel` that it fits. Runs on the *driver*.

The only place where Spark, the launcher and the training meet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.estimators.summary import TrainingSummary
    from sparkdl.estimators.torch_estimator import TorchEstimator
    from sparkdl.estimators.torch_model import TorchModel
    from sparkdl.training.callbacks import Callback, FitContext

# Loaded on first use: what the ranks run lies in this package too, and they need neither pyspark.ml nor pandas, which
# takes each of them more than half a second.
_MODULES = {
    "Callback": "sparkdl.training.callbacks",
    "FitContext": "sparkdl.training.callbacks",
    "TorchEstimator": "sparkdl.estimators.torch_estimator",
    "TorchModel": "sparkdl.estimators.torch_model",
    "TrainingSummary": "sparkdl.estimators.summary",
}

__all__ = ["Callback", "FitContext", "TorchEstimator", "TorchModel", "TrainingSummary"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
