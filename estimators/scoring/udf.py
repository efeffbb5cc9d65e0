"""Predictions as a Spark UDF. Made on the *driver*, run in Spark's Python workers on the *executors*.

Before version 4.1, Spark accepts only pandas functions; there the function on Arrow arrays is wrapped in a pandas UDF.

Only the feature columns go to Python; all other columns stay in the JVM. Several feature columns of numbers are packed
into one array by the plan that the driver makes, and unpacked in Python on the executors: a row of 28 doubles takes
Spark's JVM about a quarter less time in one array than in 28 columns, and even less as floats.

A worker process caches the models that it has loaded, so that a model is loaded once per process and not once per
task.
"""

from __future__ import annotations

import gc
import operator
import os
import uuid
from collections import OrderedDict
from collections.abc import (
    Callable,
    Iterator,
)  # imported at run time, because Spark reads the annotations of the functions that it runs
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import safetensors.torch
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DecimalType,
    DoubleType,
    LongType,
    NumericType,
    StructType,
    TimestampType,
)
from torch import nn

from sparkdl.cores import thread_variables, threads_of_task
from sparkdl.data import Column
from sparkdl.data.dataset.arrow import describe_type, is_list, to_numpy
from sparkdl.data.spark.columns import is_encoded, is_vector, quote
from sparkdl.errors import DataError
from sparkdl.estimators.scoring.columns import PREDICTION, ScoredColumn, outputs_for, result_type, to_arrow
from sparkdl.model.architecture import join_module
from sparkdl.model.inputs import MATRIX
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelSignature
from sparkdl.model.weights_file import map_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType

    from sparkdl.model.inputs import ModelInputs


ScoreArrays = Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]]


def udf_on_pandas(
    score_arrays: ScoreArrays,
    returned: str,
    features: Mapping[str, DataType],
    packing: Packing | None,
    *,
    keeps_nulls: bool = False,
) -> Callable[..., SparkColumn]:
    """Return a function that makes a prediction column from feature columns, by a pandas UDF.

    pandas has one value for null and NaN, and makes floating-point numbers of all integers of a batch in which one is
    null. Therefore Spark replaces nulls of numbers before, and an extra column marks their rows. A prediction that is
    NaN becomes null. A pandas function cannot return a null struct; it returns arrays of one struct or none.

    Args:
        score_arrays: function that yields the predictions of each batch of feature columns.
        returned: Spark type of the predictions.
        features: types of the feature columns by name, as they are sent.
        packing: how the feature columns are packed into one column; None if they are not.
        keeps_nulls: whether the model takes the nulls that :func:`convert_for_python` leaves.
    """
    from pyspark.sql.pandas.functions import pandas_udf
    from pyspark.sql.pandas.types import to_arrow_type

    make_udf: Any = pandas_udf
    is_struct = returned.startswith("struct<")
    types = None if packing is not None else {name: to_arrow_type(type_) for name, type_ in features.items()}

    def score(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        for predictions in score_arrays(_to_arrow(columns, types) for columns in batches):
            yield _to_pandas(predictions)

    udf = make_udf(score, f"array<{returned}>" if is_struct else returned).asNondeterministic()

    def predict(*columns: SparkColumn) -> SparkColumn:
        if packing is not None:
            (packed,) = columns
            flag = F.when(F.exists(packed, lambda number: number.isNull()), _ABSENT).otherwise(_PRESENT)
            filled = [packing.without_nulls(packed)]
        elif keeps_nulls:
            flag, filled = F.lit(_PRESENT), list(columns)
        else:
            flag = F.when(reduce(operator.or_, (column.isNull() for column in columns)), _ABSENT)
            for number, (column, type_) in enumerate(zip(columns, features.values(), strict=True)):
                if isinstance(type_, ArrayType) and (
                    type_.containsNull or isinstance(type_.elementType, ArrayType)
                ):
                    flag = flag.when(_has_null(column, type_), number)
            flag = flag.otherwise(_PRESENT)
            filled = [
                _without_null(column, type_, flag)
                for column, type_ in zip(columns, features.values(), strict=True)
            ]
        column = udf(*filled, flag)
        return F.get(column, F.lit(0)) if is_struct else column

    return predict


_PRESENT, _ABSENT = -1, -2
"""Flags of rows without and with a null; another flag is the number of a column with a null inside its array."""


def _has_null(array: SparkColumn, type_: ArrayType) -> SparkColumn:
    inner = type_.elementType
    if not isinstance(inner, ArrayType):
        return F.exists(array, lambda item: item.isNull())
    return F.exists(array, lambda item: item.isNull() | _has_null(item, inner))


def _without_null(column: SparkColumn, type_: DataType, flag: SparkColumn) -> SparkColumn:
    """Return a feature column without those nulls for which pandas would change the values of other rows."""
    if isinstance(type_, NumericType | BooleanType):
        return F.coalesce(column, F.lit(0).cast(type_))
    if isinstance(type_, StructType):  # an image
        fields = [
            F.coalesce(column.getField(field.name), F.lit("0").cast(field.dataType)).alias(field.name)
            for field in type_
        ]
        return F.struct(*fields)
    return F.when(flag == _PRESENT, column)


def _to_arrow(
    columns: tuple[pd.Series | pd.DataFrame, ...], types: Mapping[str, pa.DataType] | None
) -> tuple[pa.Array, ...]:
    """Return the feature columns of a batch as Arrow arrays; the last of ``columns`` holds the flags of the rows.

    Args:
        columns: columns of a batch.
        types: types of the feature columns by name; None if they are packed.
    """
    *features, given = columns
    flags = given.to_numpy()
    absent = flags == _ABSENT
    if types is None:
        (rows,) = features
        return (_numbers_of_rows(rows, absent),)
    if (flags >= 0).any():
        number = int(flags[flags >= 0][0])
        raise DataError(
            f"Column {list(types)[number]!r} has nulls inside arrays in {int((flags == number).sum())} of {len(flags)} "
            "rows. Fill those values, or leave their rows out."
        )
    return tuple(
        _column(feature, absent, type_) for feature, type_ in zip(features, types.values(), strict=True)
    )


def _column(column: pd.Series | pd.DataFrame, absent: npt.NDArray[np.bool_], type_: pa.DataType) -> pa.Array:
    """Return a column as an Arrow array with null in absent rows; Spark passes a struct as a pandas DataFrame."""
    if isinstance(column, pd.Series):
        return pa.array(column.to_numpy(), type=type_, mask=absent, from_pandas=False)
    fields = [pa.array(column[field.name].to_numpy(), type=field.type) for field in type_]
    return pa.StructArray.from_arrays(fields, fields=list(type_), mask=pa.array(absent))


def _numbers_of_rows(rows: pd.Series, absent: npt.NDArray[np.bool_]) -> pa.Array:
    """Return arrays of equal length as an Arrow array, with all numbers null in absent rows."""
    matrix = np.stack(rows.to_numpy()) if len(rows) else np.zeros((0, 1))
    width = matrix.shape[1]
    numbers = pa.array(matrix.reshape(-1), mask=np.repeat(absent, width), from_pandas=False)
    return pa.ListArray.from_arrays(np.arange(0, width * len(rows) + 1, width, dtype=np.int32), numbers)


def _to_pandas(predictions: pa.Array) -> pd.Series:
    if not pa.types.is_struct(predictions.type):
        return predictions.to_pandas()
    return pd.Series([[] if row is None else [row] for row in predictions.to_pylist()], dtype=object)


_DIRECTLY = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class Packing:
    """How feature columns are packed into one column for Python.

    Attributes:
        element: Spark's name of the numeric type to which the columns are cast.
        keeps_nulls: whether the model takes nulls, which become NaN; otherwise their rows get null.
    """

    element: str
    keeps_nulls: bool = False

    def pack(self, names: Sequence[str]) -> SparkColumn:
        """Return one column of arrays that holds the named columns.

        It is built as one SQL expression: with Column objects, ten thousand columns would take more than a hundred
        thousand calls to the JVM.
        """
        casts = [f"cast({quote(name)} as {self.element})" for name in names]
        if self.keeps_nulls:
            casts = [f"coalesce({cast}, {self.element}('NaN'))" for cast in casts]
        return F.expr(f"array({', '.join(casts)})")

    def without_nulls(self, packed: SparkColumn) -> SparkColumn:
        """Return the packed column with zeros for nulls, so that pandas does not convert integers to floats."""
        if self.element in _DIRECTLY.values():
            return packed
        zero = F.lit(0).cast(self.element)
        return F.transform(packed, lambda number: F.coalesce(number, zero))

    def unpack(
        self, packed: pa.Array, inputs: ModelInputs
    ) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.bool_] | None]:
        """Return the feature columns of the rows without a null, and a mask of the rows with a null.

        The columns are returned by name, or as a matrix if the model is called with one. The mask is None if no row has
        a null.
        """
        values, width, absent = packed.flatten(), len(inputs.columns), None
        if values.null_count:
            absent = values.is_null().to_numpy(zero_copy_only=False).reshape(-1, width).any(axis=1)
            values = values.filter(pa.array(np.repeat(~absent, width)))
        numbers = values.to_numpy(zero_copy_only=False).reshape(-1, width)
        if inputs.given_by == "matrix":
            return {MATRIX: numbers}, absent
        columns = np.array(numbers.T, order="C")  # a copy, with contiguous columns
        return dict(zip(inputs.names, columns, strict=True)), absent


def packing_of(types: Sequence[DataType], inputs: ModelInputs) -> Packing | None:
    """Return how feature columns of these types can be packed into one column; None if they cannot.

    If all columns enter the model as numbers of one floating type, Spark casts them to it. With prepareFeatures the
    user's function gets the columns unchanged, so all have to be of one type.

    Args:
        types: types of the feature columns in the DataFrame.
        inputs: inputs of the model.
    """
    are_plain = all(
        isinstance(type_, NumericType | BooleanType) and not isinstance(type_, DecimalType) for type_ in types
    )
    if len(types) < 2 or not inputs.come_as_numbers or not are_plain:
        return None
    if inputs.take_nulls:
        return Packing("double", keeps_nulls=True)
    given = {entry.dtype for entry in inputs.inputs}
    if inputs.prepare is None and len(given) == 1 and given <= set(_DIRECTLY):
        return Packing(_DIRECTLY[given.pop()])
    return Packing(types[0].simpleString()) if all(type_ == types[0] for type_ in types) else None


def convert_for_python(column: SparkColumn, type_: DataType, *, keeps_nulls: bool = False) -> SparkColumn:
    """Return a feature column as it goes to Python: vectors as arrays, images of Hugging Face's files as bytes.

    Instants go as microseconds in UTC: as timestamps, pandas functions would get them as clock times of the session's
    time zone. With ``keeps_nulls``, nulls of numbers become NaN, and nulls of instants become the integer that NumPy
    reads as NaT.
    """
    if is_vector(type_):
        # Under a condition, because it fails on a null, which has to give null in all added columns.
        return F.when(column.isNotNull(), vector_to_array(column))
    if is_encoded(type_):
        return column.getField("bytes")
    if isinstance(type_, ArrayType) and sent_type(type_, keeps_nulls=keeps_nulls) != type_:
        element = type_.elementType
        return F.transform(column, lambda item: convert_for_python(item, element, keeps_nulls=keeps_nulls))
    if keeps_nulls and isinstance(type_, NumericType | BooleanType):
        return F.coalesce(column.cast("double"), F.lit(float("nan")))
    if isinstance(type_, TimestampType):
        micros = F.unix_micros(column)
        return F.coalesce(micros, F.lit(_NOT_A_TIME)) if keeps_nulls else micros
    return column


_NOT_A_TIME = -(2**63)


def sent_type(type_: DataType, *, keeps_nulls: bool = False) -> DataType:
    """Return the type of a column that :func:`convert_for_python` returns."""
    if is_vector(type_):
        return ArrayType(DoubleType(), containsNull=False)
    if isinstance(type_, ArrayType):
        element = sent_type(type_.elementType, keeps_nulls=keeps_nulls)
        has_null = type_.containsNull and not (keeps_nulls and isinstance(element, DoubleType))
        return ArrayType(element, has_null)
    if keeps_nulls and isinstance(type_, NumericType | BooleanType):
        return DoubleType()
    if is_encoded(type_):
        return BinaryType()
    return LongType() if isinstance(type_, TimestampType) else type_


_MAX_LOADED = 4
_loaded: OrderedDict[str, Predictor] = OrderedDict()


@dataclass(frozen=True)
class ScoringModel:
    """What an executor needs to predict.

    Attributes:
        structure: pickle of the module without its tensors.
        weights: tensors of the module in the safetensors format, or the name of the Spark file that holds them.
        signature: inputs and outputs of the model.
        batch_size: number of rows per forward pass.
        key: unique key of the model in a worker process's cache of loaded models.
        num_threads: number of threads of each task that the user chose; None for the cores of a task.
        shares_gpu: whether several tasks use a GPU at once, and then one copy of the module on it.
        module_key: unique key of the module, whatever the batch size.
    """

    structure: bytes
    weights: bytes | str
    signature: ModelSignature
    batch_size: int
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    num_threads: int | None = None
    shares_gpu: bool = False
    module_key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def predicting(self, signature: ModelSignature) -> ScoringModel:
        """Return the model with a signature whose outputs may have thresholds; workers load it for itself."""
        if signature.outputs == self.signature.outputs:
            return self
        thresholds = [output.thresholds for output in signature.outputs]
        return replace(self, signature=signature, key=f"{self.key}, thresholds {thresholds}")


def prediction_udf(
    model: ScoringModel,
    wanted: tuple[ScoredColumn, ...] = PREDICTION,
    packing: Packing | None = None,
    types: Sequence[DataType] = (),
) -> Any:
    """Return a Spark UDF that computes the wanted columns from the feature columns; see :func:`result_type`.

    With a ``packing`` the UDF takes the one column into which it packs the feature columns; otherwise it takes them as
    :func:`convert_for_python` returns them. ``types`` are the types of the feature columns in the DataFrame.

    The UDF is marked as nondeterministic because Spark would otherwise compute it again for a filter on its result, and
    for each field that is taken from a struct.
    """
    returned = result_type(wanted, model.signature.outputs)

    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return score_columns(model, batches, wanted, packing)

    try:
        from pyspark.sql.pandas.functions import arrow_udf  # since Spark 4.1
    except ImportError:
        inputs = model.signature.inputs
        types_sent = [sent_type(type_, keeps_nulls=inputs.take_nulls) for type_ in types]
        features = dict(zip(inputs.names, types_sent, strict=False))
        return udf_on_pandas(score, returned, features, packing, keeps_nulls=inputs.take_nulls)
    make_udf: Any = arrow_udf  # its overloads name the kinds of functions by numbers
    if packing is not None or len(model.signature.inputs.columns) == 1:

        def score_one(columns: Iterator[pa.Array]) -> Iterator[pa.Array]:
            return score((column,) for column in columns)

        return make_udf(score_one, returned).asNondeterministic()

    return make_udf(score, returned).asNondeterministic()


def score_columns(
    model: ScoringModel,
    batches: Iterator[tuple[pa.Array, ...]],
    wanted: tuple[ScoredColumn, ...] = PREDICTION,
    packing: Packing | None = None,
) -> Iterator[pa.Array]:
    """Yield the wanted columns of each batch of feature columns. Runs on an *executor*.

    A row with a null gets null in all wanted columns, and so does a row with NaN for which the module returns NaN.

    Raises:
        DataError: if rows have another shape than the model was trained on, or hold a null within an array, or if the
            module returns NaN for rows without NaN.
    """
    predictor = load_predictor(model)
    for columns in batches:
        if packing is not None:
            features, absent = packing.unpack(columns[0], predictor.signature.inputs)
            yield score_features(predictor, features, absent, wanted)
        else:
            yield score_batch(predictor, columns, wanted)


def load_predictor(model: ScoringModel) -> Predictor:
    """Return the predictor for a model, which is loaded at the first call in a process and cached."""
    if model.key not in _loaded:
        _limit_threads(model.num_threads)
        device = _device()
        if model.shares_gpu and device != "cpu":
            module, device = _shared_module(model, device), "cpu"
        else:
            module = _load_module(model)
        saved = SavedModel(module, model.signature)
        _loaded[model.key] = Predictor(saved, batch_size=model.batch_size, device=device)
        gc.unfreeze()
        while len(_loaded) > _MAX_LOADED:
            _loaded.popitem(last=False)
        gc.collect()  # otherwise gc.freeze() would keep present garbage for good, such as a model that refers to itself
        # Spark's worker collects garbage after every task, which takes 0.1 s for the objects that torch imports. Cycles
        # that the user's own functions hold now are freed only when another model is loaded.
        gc.freeze()
    _loaded.move_to_end(model.key)
    return _loaded[model.key]


def _load_module(model: ScoringModel) -> nn.Module:
    if isinstance(model.weights, bytes):
        return join_module(model.structure, safetensors.torch.load(model.weights))
    from pyspark import SparkFiles

    return join_module(model.structure, map_weights(SparkFiles.get(model.weights)))


def _shared_module(model: ScoringModel, device: str) -> nn.Module:
    """Return what calls the one copy of a model on a GPU, which all tasks of this executor share."""
    from pyspark import SparkFiles

    from sparkdl.estimators.scoring.shared_module import SharedModule  # needed where GPUs are shared

    weights = model.weights if isinstance(model.weights, bytes) else SparkFiles.get(model.weights)
    owner = SparkFiles.getRootDirectory()
    return SharedModule(model.module_key, model.structure, weights, device=device, owner=owner)


def score_batch(
    predictor: Predictor, columns: tuple[pa.Array, ...], wanted: tuple[ScoredColumn, ...] = PREDICTION
) -> pa.Array:
    """Return the wanted columns for one batch of Arrow arrays, which are the feature columns in their order."""
    signature = predictor.signature
    nulls = [
        column.is_null().to_numpy(zero_copy_only=False)
        for column, expected in zip(columns, signature.inputs.columns, strict=True)
        if column.null_count and not expected.takes_nulls
    ]
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
    """Return the wanted columns for feature columns by name, or for their matrix, with null in absent rows.

    ``features`` holds only the rows that are not absent. Rows with NaN among their features for which the module
    returns NaN get null, too.
    """
    outputs = predictor.signature.outputs
    of_each = {
        output.name: [column.answer for column in wanted if output in outputs_for(column, outputs)]
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
    if "timestamp" in (expected.kind, *expected.element):
        column = column.cast(_with_timestamps(column.type))
    # Rows may have another numeric type than the rows that the model was trained on.
    kind, dtype, _ = describe_type(expected.name, column.type)
    if expected.kind == kind == "number":
        expected = replace(expected, dtype=dtype)
    elif expected.kind == "ragged" and expected.element[0] == kind == "number":
        expected = replace(expected, element=(kind, dtype))
    remedy = "The model was trained on arrays of that length: bring those of every row to it."
    return to_numpy(pa.chunked_array([column]), expected, lambda *_: remedy)


def _with_timestamps(type_: pa.DataType) -> pa.DataType:
    """Return the type of microseconds, or arrays of them, as timestamps; other types unchanged."""
    if is_list(type_):
        return pa.list_(_with_timestamps(type_.value_type))
    return pa.timestamp("us") if pa.types.is_int64(type_) else type_


def _limit_threads(num_threads: int | None) -> None:
    """Limit this task's libraries to its threads; otherwise every task would use all cores of the machine."""
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    threads = threads_of_task(num_threads, context.cpus() if context is not None else 1)
    for name, value in thread_variables(threads).items():  # tokenizers read theirs on first use
        os.environ.setdefault(name, value)
    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)


def _device() -> str:
    """Return the GPU that Spark assigned to this task, or the CPU; GPUs that are not assigned belong to other tasks."""
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    return f"cuda:{gpus.addresses[0]}" if gpus is not None and torch.cuda.is_available() else "cpu"
