"""Sends a model's weights to a Spark Connect server, beside the plans that use them. Runs on the *driver*.

On classic Spark a function above 1 MiB travels as a broadcast. A Connect client has no broadcasts: the function would
be part of every plan, of which a plan above 128 MiB is refused, and one of 100 MiB exhausted a server with 1 GiB of
memory. An artifact goes to the server once per session and in pieces, and from there to the executors.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sparkdl.launch.preflight import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.estimators.scoring import ScoringModel

MAX_BYTES_IN_PLAN = 1 << 20

_sent: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def with_sent_weights(model: ScoringModel, spark: SparkSession) -> ScoringModel:
    """Return the model as plans of a session may hold it: without large weights, which the server then has."""
    weights = model.module.weights
    if not is_connect(spark) or len(weights) <= MAX_BYTES_IN_PLAN:
        return model
    name = f"sparkdl-{model.key}.safetensors"
    names = _sent.setdefault(spark, set())
    if name not in names:
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            path = Path(folder) / name
            path.write_bytes(weights)
            spark.addArtifacts(str(path), file=True)
        names.add(name)
    return replace(model, module=replace(model.module, weights=b""), weights_file=name)
