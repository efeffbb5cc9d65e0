"""sparkdl trains PyTorch models on the machines of a Spark cluster.

Importing this package imports neither torch nor pyspark; :mod:`sparkdl.estimators` is the face for DataFrames.
"""

from __future__ import annotations

__version__ = "0.1.0"
