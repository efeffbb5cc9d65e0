"""Predictions for a Spark column. Made on the *driver*, run in Spark's Python workers on the *executors*.

Only the feature column goes to Python; all others stay where they are. A worker process keeps the models that
it has loaded, so that a model is loaded once per process and not once per task.
"""

from __future__ import annotations

import math
import uuid
from collections import OrderedDict
from collections.abc import Iterator  # at run time, as Spark reads the annotations of the functions it runs
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from safetensors.torch import load_file
from torch import nn

from sparkdl.data import Column
from sparkdl.data.arrow_columns import describe_type, to_numpy
from sparkdl.training.architecture import PackedModule, join_module, unpack_module
from sparkdl.training.predictor import Predictor
from sparkdl.training.saved_model import ModelSignature, SavedModel

_MAX_LOADED = 4
_loaded: OrderedDict[str, Predictor] = OrderedDict()


@dataclass(frozen=True)
class ScoringModel:
    """What an executor needs to predict.

    Attributes:
        module: the module as bytes.
        signature: what it takes and gives.
        batch_size: rows per forward pass.
        key: tells models apart in a worker process.
        weights_file: name of the file of Spark that holds the weights, where ``module`` does not.
    """

    module: PackedModule
    signature: ModelSignature
    batch_size: int
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    weights_file: str | None = None


def prediction_udf(model: ScoringModel) -> Any:
    """Return a Spark function of the feature column that gives predictions: a double, or an array of doubles.

    It is marked as not deterministic, which it is: Spark would otherwise compute it again for a filter on its
    result.
    """
    result_type = "array<double>" if model.signature.prediction_shape else "double"
    try:
        from pyspark.sql.pandas.functions import arrow_udf  # since Spark 4.1
    except ImportError:
        return _pandas_udf(model, result_type)

    def score(columns: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return score_columns(model, columns)

    make_udf: Any = arrow_udf  # its overloads name the kinds of functions by numbers
    return make_udf(score, result_type).asNondeterministic()


def _pandas_udf(model: ScoringModel, result_type: str) -> Any:
    from pyspark.sql.pandas.functions import pandas_udf

    def score(columns: Iterator[pd.Series]) -> Iterator[pd.Series]:
        arrays = (pa.Array.from_pandas(column) for column in columns)
        for predictions in score_columns(model, arrays):
            yield predictions.to_pandas()

    make_udf: Any = pandas_udf
    return make_udf(score, result_type).asNondeterministic()


def score_columns(model: ScoringModel, columns: Iterator[pa.Array]) -> Iterator[pa.Array]:
    """Yield the predictions for each Arrow array of features; a null row has a null prediction. Runs on an *executor*.

    Raises:
        DataError: if rows have another shape than the model was trained on, or hold a null inside.
    """
    predictor = load_predictor(model)
    for column in columns:
        yield score_column(predictor, column)


def load_predictor(model: ScoringModel) -> Predictor:
    """Return this process's predictor for a model, loading it the first time."""
    if model.key not in _loaded:
        _limit_threads()
        saved = SavedModel(_load_module(model), model.signature)
        _loaded[model.key] = Predictor(saved, batch_size=model.batch_size, device=_device())
        while len(_loaded) > _MAX_LOADED:
            _loaded.popitem(last=False)
    _loaded.move_to_end(model.key)
    return _loaded[model.key]


def _load_module(model: ScoringModel) -> nn.Module:
    if model.weights_file is None:
        return unpack_module(model.module)
    from pyspark import SparkFiles

    return join_module(model.module.structure, load_file(SparkFiles.get(model.weights_file)))


def score_column(predictor: Predictor, column: pa.Array) -> pa.Array:
    """Return predictions for one Arrow array of features."""
    signature = predictor.signature
    present = column.drop_null() if column.null_count else column
    _, dtype, _ = describe_type(signature.features, column.type)
    described = Column(name=signature.features, dtype=dtype, shape=signature.features_shape)
    features = to_numpy(pa.chunked_array([present]), described)
    predictions = predictor.predict({signature.features: features})
    absent = np.asarray(column.is_null()) if column.null_count else None
    rows = predictions.reshape(len(predictions), math.prod(signature.prediction_shape))
    return _to_arrow(rows, absent, is_array=signature.prediction_shape != ())


def _to_arrow(
    predictions: npt.NDArray[np.float64], absent: npt.NDArray[np.bool_] | None, *, is_array: bool
) -> pa.Array:
    num_rows = len(predictions) if absent is None else len(absent)
    present = np.ones(num_rows, dtype=bool) if absent is None else ~absent
    if not is_array:
        values = np.zeros(num_rows)
        values[present] = predictions[:, 0]
        return pa.array(values, mask=absent)
    offsets = np.concatenate([[0], np.cumsum(present * predictions.shape[1])]).astype(np.int32)
    mask = None if absent is None else pa.array(absent)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(predictions.reshape(-1)), mask=mask)


def _limit_threads() -> None:
    """Give torch the cores of this task; it would take all of the machine's, in every task at once."""
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    torch.set_num_threads(max(1, context.cpus()) if context is not None else 1)


def _device() -> str:
    """Return the GPU that Spark assigned to this task, or the CPU; a GPU that was not assigned belongs to others."""
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    return f"cuda:{gpus.addresses[0]}" if gpus is not None and torch.cuda.is_available() else "cpu"
