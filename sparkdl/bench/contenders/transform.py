"""Tables, models and contenders of ``sparkdl bench transform``. A contender adds a column of predictions to a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, StructField, StructType
from torch import Tensor, nn

from sparkdl.data import Column
from sparkdl.estimators import TorchModel
from sparkdl.model.inputs import MATRIX, ModelInput, ModelInputs
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMES = [f"x{index}" for index in range(28)]
IMAGE_SHAPE = (3, 32, 32)
# Each contender's fastest batch size on tables, of a few that were tried; on images small batches stay in cache.
BATCH_SIZE_OF_SPARK = 10_000
BATCH_SIZE_OF_TABLES = 4096
BATCH_SIZE_OF_IMAGES = 128

Contender = Callable[["DataFrame"], "DataFrame"]
"""Function that adds the column ``prediction`` to a DataFrame."""


class Pixels(nn.Module):
    """Scales bytes to numbers from 0 to 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Return pixels as float32, from 0 to 1."""
        return pixels.to(torch.float32) / 255


def make_mlp() -> nn.Module:
    """Make an MLP with layers of 28, 64, 64 and 1 units."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(28, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).eval()


def make_cnn() -> nn.Module:
    """Make a network of two convolutions on images of 3 x 32 x 32 bytes, with one output."""
    torch.manual_seed(0)
    return nn.Sequential(
        Pixels(),
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 1),
    ).eval()


def decode(images: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of N images as an array of the shape ``(N, 3, 32, 32)``."""
    return np.frombuffer(b"".join(images), np.uint8).reshape(-1, *IMAGE_SHAPE)


def decode_column(columns: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """Decode the column ``image`` by :func:`decode`; a function for ``prepareFeatures``."""
    return decode(columns["image"])


def columns_table(spark: SparkSession, num_rows: int, num_partitions: int) -> DataFrame:
    """Return a table of 28 columns of doubles, and an id."""
    rows = spark.range(0, num_rows, 1, num_partitions)
    return rows.select("id", *[F.randn(seed).alias(name) for seed, name in enumerate(NAMES)])


def image_table(spark: SparkSession, num_rows: int, num_partitions: int) -> DataFrame:
    """Return a table of images as the bytes of their pixels, which are concatenated hashes of 64 bytes each."""
    num_hashes = int(np.prod(IMAGE_SHAPE)) // 64
    parts = [F.unhex(F.sha2(F.concat_ws(":", "id", F.lit(index)), 512)) for index in range(num_hashes)]
    return spark.range(0, num_rows, 1, num_partitions).select("id", F.concat(*parts).alias("image"))


def _torch_model(module: nn.Module, columns: list[Column], batch_size: int, **of_inputs: Any) -> Contender:
    dtype = "uint8" if columns[0].kind == "binary" else "float32"
    names = [MATRIX] if of_inputs.get("given_by") == "matrix" else [column.name for column in columns]
    inputs = ModelInputs(
        columns=tuple(columns),
        inputs=tuple(ModelInput(name=name, dtype=dtype) for name in names),
        **of_inputs,
    )
    signature = ModelSignature(inputs=inputs, outputs=(ModelOutput(name="y", kind="value"),))
    model = TorchModel(SavedModel(module, signature))
    model.setParams(featuresCol=[column.name for column in columns], predictionBatchSize=batch_size)
    return model.transform


def _predict_batch(
    module: nn.Module, shape: list[int] | None, batch_size: int, features: Callable[[], Any]
) -> Contender:
    """Return a contender that uses ``predict_batch_udf`` as documented, with one thread, as a task has one core."""

    def make_predict() -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
        torch.set_num_threads(1)

        def predict(inputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
            array = decode(inputs) if shape is None else np.ascontiguousarray(inputs, np.float32)
            with torch.inference_mode():
                outputs: npt.NDArray[Any] = module(torch.tensor(array)).numpy().astype(np.float64)
            return outputs

        return predict

    shapes: list[list[int] | None] | None = None if shape is None else [shape]
    predict_udf: Any = predict_batch_udf(
        make_predict, return_type=DoubleType(), batch_size=batch_size, input_tensor_shapes=shapes
    )
    return lambda frame: frame.withColumn("prediction", predict_udf(features()))


def _map_in_arrow(
    module: nn.Module, batch_size: int, features: Callable[[pa.RecordBatch], npt.NDArray[Any]]
) -> Contender:
    """Return a contender that hands Arrow batches back by ``mapInArrow``, with the module's outputs as one more column.

    It is the limit for the others: rows pass to Python and back, and nothing is checked.
    """

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        torch.set_num_threads(1)
        for batch in batches:
            rows = torch.from_numpy(features(batch))
            with torch.inference_mode():
                outputs = torch.cat([module(part) for part in rows.split(batch_size)])
            column = pa.array(outputs.reshape(-1).double().numpy())
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, column], names=[*batch.schema.names, "prediction"]
            )

    def transform(frame: DataFrame) -> DataFrame:
        schema = StructType([*frame.schema.fields, StructField("prediction", DoubleType())])
        return frame.mapInArrow(score, schema)

    return transform


def _matrix_of_columns(batch: pa.RecordBatch) -> npt.NDArray[Any]:
    return np.stack(
        [batch.column(name).to_numpy() for name in NAMES], axis=1, dtype=np.float32, casting="same_kind"
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """A table, its usual number of rows, and the contenders that score it."""

    table: Callable[[SparkSession, int, int], DataFrame]
    num_rows: int
    contenders: Callable[[], dict[str, Contender]]


def _of_columns() -> dict[str, Contender]:
    columns = [Column(name=name, dtype="float64") for name in NAMES]
    as_array = _predict_batch(make_mlp(), [28], BATCH_SIZE_OF_SPARK, lambda: F.array(*NAMES))
    as_struct = _predict_batch(make_mlp(), [28], BATCH_SIZE_OF_SPARK, lambda: F.struct(*NAMES))
    return {
        "sparkdl": _torch_model(make_mlp(), columns, BATCH_SIZE_OF_TABLES, given_by="matrix"),
        "predict_batch_udf of an array": as_array,
        "predict_batch_udf of a struct": as_struct,
        "mapInArrow": _map_in_arrow(make_mlp(), BATCH_SIZE_OF_TABLES, _matrix_of_columns),
    }


def _of_arrays() -> dict[str, Contender]:
    column = Column(name="features", dtype="float64", shape=(28,))
    return {
        "sparkdl": _torch_model(make_mlp(), [column], BATCH_SIZE_OF_TABLES),
        "predict_batch_udf": _predict_batch(make_mlp(), [28], BATCH_SIZE_OF_SPARK, lambda: F.col("features")),
        "mapInArrow": _map_in_arrow(
            make_mlp(),
            BATCH_SIZE_OF_TABLES,
            lambda batch: batch.column("features").flatten().to_numpy().reshape(-1, 28).astype(np.float32),
        ),
    }


def _of_images() -> dict[str, Contender]:
    column = Column(name="image", dtype="object", kind="binary")
    return {
        "sparkdl": _torch_model(make_cnn(), [column], BATCH_SIZE_OF_IMAGES, prepare=decode_column),
        "predict_batch_udf": _predict_batch(make_cnn(), None, BATCH_SIZE_OF_IMAGES, lambda: F.col("image")),
        "mapInArrow": _map_in_arrow(
            make_cnn(),
            BATCH_SIZE_OF_IMAGES,
            lambda batch: decode(batch.column("image").to_numpy(zero_copy_only=False)).copy(),
        ),
    }


TASKS = {
    "28 columns": Task(table=columns_table, num_rows=2_000_000, contenders=_of_columns),
    "array of 28": Task(
        table=lambda *size: columns_table(*size).select("id", F.array(*NAMES).alias("features")),
        num_rows=2_000_000,
        contenders=_of_arrays,
    ),
    "images": Task(table=image_table, num_rows=50_000, contenders=_of_images),
}
"""Tasks by name."""
