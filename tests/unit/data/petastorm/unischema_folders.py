"""Folders as Petastorm's ``materialize_dataset`` writes them, with its codecs and metadata, written without Spark."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sparkdl.data.petastorm.containment import install
from sparkdl.data.petastorm.former_parquet import FormerParquetDataset

install()
from petastorm import utils
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
from petastorm.etl.dataset_metadata import ROW_GROUPS_PER_FILE_KEY, _generate_unischema_metadata
from petastorm.unischema import Unischema, UnischemaField
from pyspark.sql.types import IntegerType, StringType

if TYPE_CHECKING:
    from collections.abc import Sequence


def image_codec() -> CompressedImageCodec:
    """Petastorm's codec for PNG; its constructor needs OpenCV, which decoding does not."""
    codec = CompressedImageCodec.__new__(CompressedImageCodec)
    codec._image_codec, codec._quality = ".png", 80
    return codec


SCHEMA = Unischema(
    "Scenes",
    [
        UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False),
        UnischemaField("score", np.float64, (), None, False),
        UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
        UnischemaField("packed", np.uint8, (4,), CompressedNdarrayCodec(), False),
        UnischemaField("image", np.uint8, (5, 4, 3), image_codec(), False),
        UnischemaField("points", np.float32, (None, 2), NdarrayCodec(), False),
        UnischemaField("name", np.str_, (), ScalarCodec(StringType()), False),
    ],
)


def scene(number: int) -> dict[str, Any]:
    """The row of a scene's number, before it is encoded."""
    return {
        "id": np.int32(number),
        "score": number / 2,
        "matrix": np.full((2, 3), number, np.float32),
        "packed": np.arange(number, number + 4, dtype=np.uint8),
        "image": (np.arange(60) + number).astype(np.uint8).reshape(5, 4, 3),
        "points": np.full((number % 3, 2), number, np.float32),
        "name": f"scene {number}",
    }


def encode(name: str, value: Any) -> Any:
    field = SCHEMA.fields[name]
    if isinstance(field.codec, CompressedImageCodec):
        file = BytesIO()
        Image.fromarray(value).save(file, "png")
        return file.getvalue()
    encoded = field.codec.encode(field, value) if field.codec else value
    return bytes(encoded) if isinstance(encoded, bytearray) else encoded


def write_scenes(folder: Path, row_groups_of_files: Sequence[Sequence[int]]) -> str:
    """Write scenes numbered from 0 as files with row groups of the given sizes; return the folder's path."""
    folder.mkdir()
    start = 0
    row_groups = {}
    for index, sizes in enumerate(row_groups_of_files):
        writer = None
        for size in sizes:
            rows = [
                {name: encode(name, value) for name, value in scene(number).items()}
                for number in range(start, start + size)
            ]
            table = pa.Table.from_pylist(rows)
            table = table.set_column(0, "id", table.column("id").cast(pa.int32()))
            path = folder / f"part-{index:05d}.parquet"
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            start += size
        assert writer is not None
        writer.close()
        row_groups[path.name] = len(sizes)
    dataset = FormerParquetDataset(str(folder))
    _generate_unischema_metadata(dataset, SCHEMA)
    utils.add_to_dataset_metadata(
        FormerParquetDataset(str(folder)), ROW_GROUPS_PER_FILE_KEY, json.dumps(row_groups).encode()
    )
    return str(folder)
