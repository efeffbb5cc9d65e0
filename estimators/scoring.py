"""Predictions for a Spark column. Made on the *driver*, run in Spark's Python workers on the *executors*.

Only the feature columns go to Python; all others stay where they are. A worker process keeps the models that
it has loaded, so that a model is loaded once per process and not once per task.
"""

from __future__ import annotations

import gc
import uuid
from collections import OrderedDict
from collections.abc import Iterator  # at run time, as Spark reads the annotations of the functions it runs
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import nn

from sparkdl.data import Column
from sparkdl.data.dataset.arrow import describe_type, to_numpy
from sparkdl.estimators.packed_features import Packing
from sparkdl.estimators.pandas_scoring import udf_on_pandas
from sparkdl.estimators.scored_columns import PREDICTION, ScoredColumn, answering, result_type, to_arrow
from sparkdl.model.architecture import PackedModule, join_module, unpack_module
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelSignature
from sparkdl.model.weights_file import map_weights

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


def prediction_udf(
    model: ScoringModel,
    wanted: tuple[ScoredColumn, ...] = PREDICTION,
    packing: Packing | None = None,
) -> Any:
    """Return a Spark function of the feature columns that gives wanted columns, of the type :func:`result_type`.

    With a ``packing`` they go to Python as the one column that it makes of them.

    It is marked as not deterministic, which it is: Spark would otherwise compute it again for a filter on its
    result, and for each field that is taken out of a struct.
    """
    returned = result_type(wanted, model.signature.outputs)

    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return score_columns(model, batches, wanted, packing)

    try:
        from pyspark.sql.pandas.functions import arrow_udf  # since Spark 4.1
    except ImportError:
        return udf_on_pandas(score, returned, packing)
    make_udf: Any = arrow_udf  # its overloads name the kinds of functions by numbers
    if packing is not None or len(model.signature.inputs.columns) == 1:

        def score_one(columns: Iterator[pa.Array]) -> Iterator[pa.Array]:
            return score((column,) for column in columns)

        return make_udf(score_one, returned).asNondeterministic()

    def score_many(columns: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return score(columns)

    return make_udf(score_many, returned).asNondeterministic()


def score_columns(
    model: ScoringModel,
    batches: Iterator[tuple[pa.Array, ...]],
    wanted: tuple[ScoredColumn, ...] = PREDICTION,
    packing: Packing | None = None,
) -> Iterator[pa.Array]:
    """Yield what is wanted for each batch of feature columns.

    A row with a null has null in all of it, and so has one with NaN that the module answers with NaN. Runs on an
    *executor*.

    Raises:
        DataError: if rows have another shape than the model was trained on, or hold a null inside, or if the module
            answers rows without NaN with NaN.
    """
    predictor = load_predictor(model)
    for columns in batches:
        if packing is not None:
            features, absent = packing.unpacked(columns[0], predictor.signature.inputs)
            yield score_features(predictor, features, absent, wanted)
        else:
            yield score_batch(predictor, columns, wanted)


def load_predictor(model: ScoringModel) -> Predictor:
    """Return this process's predictor for a model, loading it the first time."""
    if model.key not in _loaded:
        _limit_threads()
        saved = SavedModel(_load_module(model), model.signature)
        _loaded[model.key] = Predictor(saved, batch_size=model.batch_size, device=_device())
        gc.unfreeze()
        while len(_loaded) > _MAX_LOADED:
            _loaded.popitem(last=False)
        gc.collect()  # what is garbage now would stay for good, and so would a model that refers to itself
        # Spark's worker collects garbage after every task, and looks for 0.1 s through what torch imports. Cycles that
        # the user's own functions hold now are freed when another model is loaded, and not before.
        gc.freeze()
    _loaded.move_to_end(model.key)
    return _loaded[model.key]


def _load_module(model: ScoringModel) -> nn.Module:
    if model.weights_file is None:
        return unpack_module(model.module)
    from pyspark import SparkFiles

    return join_module(model.module.structure, map_weights(SparkFiles.get(model.weights_file)))


def score_batch(
    predictor: Predictor, columns: tuple[pa.Array, ...], wanted: tuple[ScoredColumn, ...] = PREDICTION
) -> pa.Array:
    """Return what is wanted for one batch of Arrow arrays, those of the feature columns in their order."""
    signature = predictor.signature
    nulls = [column.is_null().to_numpy(zero_copy_only=False) for column in columns if column.null_count]
    absent = reduce(np.logical_or, nulls) if nulls else None
    if absent is not None:
        present = pa.array(~absent)
        columns = tuple(column.filter(present) for column in columns)
    features = {
        expected.name: _to_numpy(column, expected)
        for column, expected in zip(columns, signature.inputs.columns, strict=True)
    }
    return score_features(predictor, features, absent, wanted)


def score_features(
    predictor: Predictor,
    features: dict[str, npt.NDArray[Any]],
    absent: npt.NDArray[np.bool_] | None,
    wanted: tuple[ScoredColumn, ...],
) -> pa.Array:
    """Return what is wanted for feature columns by name, or their matrix, with null for rows that are absent there.

    Null too for rows with NaN among their features that the module answers with NaN.
    """
    outputs = predictor.signature.outputs
    of_each = {
        output.name: [column.answer for column in wanted if output in answering(column, outputs)]
        for output in outputs
    }
    answers, without = predictor.answer_complete(features, of_each)
    if without is not None:
        if absent is None:
            absent = without
        else:
            absent = absent.copy()
            absent[~absent] = without
    return to_arrow(wanted, outputs, answers, absent)


def _to_numpy(column: pa.Array, expected: Column) -> npt.NDArray[Any]:
    # Rows may come in another type of number than those that the model was trained on.
    kind, dtype, _ = describe_type(expected.name, column.type)
    if expected.kind == kind == "number":
        expected = replace(expected, dtype=dtype)
    elif expected.kind == "ragged" and expected.element[0] == kind == "number":
        expected = replace(expected, element=(kind, dtype))
    return to_numpy(pa.chunked_array([column]), expected, _trained_on_one_length)


def _trained_on_one_length(column: Column, level: int) -> str:
    del column, level
    return "The model was trained on arrays of that length: bring those of every row to it."


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
