"""sparkdl trains PyTorch models on the machines of a Spark cluster.

:mod:`sparkdl.estimators` trains on DataFrames. :class:`Runner` and :class:`HorovodRunner` run any training function
on ranks (training processes). :func:`autolog` chooses what fits log to MLflow. Importing this package imports neither
torch nor pyspark. Begin with :mod:`sparkdl.estimators`; the page of each package says which module to read first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.lazy import attributes

if TYPE_CHECKING:
    from sparkdl.mlflow import autolog
    from sparkdl.runner import HorovodRunner, Runner, distributed

__version__ = "0.1.0"

__all__ = ["HorovodRunner", "Runner", "autolog", "distributed"]

# Loaded on first use: the lower floors are used without the faces.
_MODULES = {
    "HorovodRunner": "sparkdl.runner",
    "Runner": "sparkdl.runner",
    "autolog": "sparkdl.mlflow",
    "distributed": "sparkdl.runner",
}


__getattr__, __dir__ = attributes(__name__, _MODULES)
