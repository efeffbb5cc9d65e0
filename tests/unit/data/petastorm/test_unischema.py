"""Datasets with Petastorm's Unischema in the feed, compared with Petastorm's own reader where it can read them."""

from __future__ import annotations

import os
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sparkdl.data import Column, ParquetFeed
from sparkdl.data.feed.sources import find_dataset
from sparkdl.data.petastorm.unischema import UnischemaDataset
from sparkdl.errors import CorruptFileError, DataError
from tests.unit.data.petastorm.unischema_folders import SCHEMA, scene, write_scenes

from petastorm import make_reader  # isort: skip - after the containment
from petastorm.predicates import in_lambda, in_pseudorandom_split, in_set  # isort: skip
from petastorm.transform import TransformSpec, edit_field  # isort: skip
from petastorm.etl.dataset_metadata import UNISCHEMA_KEY  # isort: skip
from petastorm.unischema import Unischema, UnischemaField  # isort: skip

FED = ["id", "score", "matrix", "packed", "image"]
OBJECTS = ["points", "name"]


@pytest.fixture
def scenes(tmp_path: Path) -> str:
    return write_scenes(tmp_path / "scenes", [[5, 3], [4]])


def read(url: str, **options: Any) -> dict[str, np.ndarray]:
    """All rows of an epoch on one rank, sorted by ``id`` if there is one."""
    settings = {"batch_size": 5, "seed": 1, **options}
    with ParquetFeed(url, **settings) as feed:
        batches = list(feed.epoch(0))
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    order = np.argsort(rows["id"]) if "id" in rows else slice(None)
    return {name: values[order] for name, values in rows.items()}


def test_images_arrays_and_scalars_are_decoded_as_they_were_written(scenes: str) -> None:
    rows = read(scenes, columns=FED)
    assert find_dataset(scenes, None).columns == (
        Column(name="id", dtype="int32"),
        Column(name="score", dtype="float64"),
        Column(name="matrix", dtype="float32", shape=(2, 3)),
        Column(name="packed", dtype="uint8", shape=(4,)),
        Column(name="image", dtype="uint8", shape=(5, 4, 3)),
        Column(
            name="points", dtype="object", kind="ragged", lengths=(None, 2), element=("number", "float32")
        ),
        Column(name="name", dtype="object", kind="string"),
    )
    for name in FED:
        expected = np.stack([scene(number)[name] for number in range(12)])
        np.testing.assert_array_equal(rows[name], expected)
        assert rows[name].dtype == expected.dtype


def test_strings_and_arrays_of_varying_length_are_objects(scenes: str) -> None:
    rows = read(scenes)
    assert list(rows) == [*FED, *OBJECTS], "all fields come by default"
    for number in range(12):
        expected = scene(number)
        assert rows["name"][number] == expected["name"]
        np.testing.assert_array_equal(rows["points"][number], expected["points"])
        assert rows["points"][number].dtype == np.float32
        assert rows["points"][number].shape == expected["points"].shape


@pytest.mark.parametrize(
    "predicate",
    [
        in_set({"scene 3", "scene 7", "scene 8"}, "name"),
        in_lambda(["matrix", "id"], lambda matrix, number: matrix[0, 0] > 4 and number % 2 == 0),
        in_lambda(["points"], lambda points: len(points) == 2),
        in_pseudorandom_split([0.5, 0.5], 0, "name"),
    ],
)
def test_predicates_keep_the_rows_that_petastorms_reader_keeps(scenes: str, predicate: Any) -> None:
    with make_reader(
        f"file://{scenes}",
        workers_count=1,
        schema_fields=["id", "name", "matrix", "points"],
        predicate=predicate,
    ) as reader:
        expected = sorted(int(row.id) for row in reader)
    assert 0 < len(expected) < 12
    for world_size in (1, 2):
        ids = [
            read(scenes, columns=["id"], row_filter=predicate, rank=rank, world_size=world_size)["id"]
            for rank in range(world_size)
        ]
        assert sorted(np.concatenate(ids).tolist()) == expected


def test_a_transform_takes_and_returns_decoded_rows_as_in_make_reader(scenes: str) -> None:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        points = np.zeros((2, 2), np.float32)
        points[: len(row["points"])] = row["points"]
        return {**row, "points": points, "number": np.int64(row["name"].split()[1])}

    spec = TransformSpec(
        change,
        edit_fields=[edit_field("points", np.float32, (2, 2)), edit_field("number", np.int64, ())],
        removed_fields=["name", "image", "packed"],
    )
    with make_reader(
        f"file://{scenes}",
        workers_count=1,
        schema_fields=["id", "score", "matrix", "points", "name"],
        transform_spec=TransformSpec(change, spec.edit_fields, ["name"]),
    ) as reader:
        expected = {int(row.id): row for row in reader}
    rows = read(scenes, transform=spec)
    assert list(rows) == ["id", "score", "matrix", "points", "number"]
    for index, number in enumerate(rows["id"].tolist()):
        for name, values in rows.items():
            np.testing.assert_array_equal(values[index], getattr(expected[number], name))
    assert rows["number"].tolist() == list(range(12))


def test_transform_takes_the_fields_in_columns_like_schema_fields_of_petastorm(scenes: str) -> None:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        assert set(row) == {"id", "points"}
        return {"id": row["id"], "count": np.int32(len(row["points"]))}

    spec = TransformSpec(change, [edit_field("count", np.int32, ())], ["points"])
    rows = read(scenes, transform=spec, columns=["id", "points"])
    assert list(rows) == ["id", "count"]
    assert rows["count"].tolist() == [len(scene(number)["points"]) for number in range(12)]
    with pytest.raises(DataError, match="no column 'count'. The columns are: "):
        ParquetFeed(scenes, columns=["count"], batch_size=2, transform=spec)


def test_field_that_cannot_be_fed_is_an_error_when_it_is_requested(scenes: str) -> None:
    spec = TransformSpec(
        edit_fields=[edit_field("price", Decimal, ()), edit_field("cloud", np.int8, (2, None))]
    )
    with pytest.raises(DataError, match="'price' cannot be fed: its type is Decimal"):
        ParquetFeed(scenes, columns={"cost": "price"}, batch_size=2, transform=spec)
    chosen = TransformSpec(edit_fields=spec.edit_fields, selected_fields=["id", "cloud"])
    with pytest.raises(DataError, match=r"'cloud' cannot be fed: its shape \(2, None\)"):
        ParquetFeed(scenes, batch_size=2, transform=chosen)


def test_unknown_field_is_named(scenes: str) -> None:
    with pytest.raises(DataError, match="no column 'nose'"):
        ParquetFeed(scenes, columns=["nose"], batch_size=2)
    with pytest.raises(DataError, match="no column 'nose'"):
        ParquetFeed(scenes, columns=["id"], batch_size=2, row_filter=in_set({1}, "nose"))


def test_a_damaged_value_is_named_with_file_row_group_and_column(scenes: str) -> None:
    path = Path(scenes) / "part-00000.parquet"
    table = pq.read_table(path)
    values = table.column("matrix").to_pylist()
    values[6] = b"no array"
    table = table.set_column(table.column_names.index("matrix"), "matrix", [values])
    pq.write_table(table, path, row_group_size=5)
    url = find_dataset(scenes, None)
    with pytest.raises(
        DataError, match=r"part-00000\.parquet, row group 1 .*'matrix' .* row 1 .*NdarrayCodec"
    ):
        read(url, columns=["matrix"], shuffle=False)


def test_a_null_in_a_decoded_column_is_an_error_of_that_column(scenes: str) -> None:
    path = Path(scenes) / "part-00001.parquet"
    table = pq.read_table(path)
    values = [None, *table.column("image").to_pylist()[1:]]
    pq.write_table(table.set_column(table.column_names.index("image"), "image", [values]), path)
    with pytest.raises(DataError, match=r"part-00001\.parquet, row group 0 .*'image' .* in row 0"):
        read(scenes, columns=["image"])


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch evil-was-here",)


def test_a_schema_cannot_run_code_nor_import_anything(scenes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scenes)
    dataset = find_dataset(scenes, None)
    evil = UnischemaDataset(
        url=scenes,
        columns=dataset.columns,
        row_groups=dataset.row_groups,
        pickled_schema=pickle.dumps(_Evil()),
    )
    with pytest.raises(DataError, match=r"refers to posix\.system, which belongs to no Unischema"):
        ParquetFeed(evil, batch_size=2)
    assert not Path("evil-was-here").exists()


def test_the_description_of_a_dataset_travels_to_the_ranks(scenes: str) -> None:
    dataset = pickle.loads(pickle.dumps(find_dataset(scenes, None)))
    np.testing.assert_array_equal(read(dataset, columns=["id"])["id"], np.arange(12))


@pytest.fixture
def partitioned(scenes: str) -> str:
    """Scenes with names, ids and flags as partition columns, as ``partitionBy`` writes them."""
    for path in sorted(Path(scenes).glob("*.parquet")):
        table = pq.read_table(path)
        path.unlink()
        for row in range(table.num_rows):
            number = table.column("id")[row].as_py()
            is_even = str(number % 2 == 0).lower()
            folder = Path(scenes, f"id={number}", f"name=scene%3A {number}", f"is_even={is_even}")
            folder.mkdir(parents=True)
            pq.write_table(table.slice(row, 1).drop_columns(["id", "name"]), folder / "part-0.parquet")
    flagged = Unischema(
        "Flagged", [*SCHEMA.fields.values(), UnischemaField("is_even", np.bool_, (), None, False)]
    )
    pickled = pickle.dumps(flagged)
    stored = pq.read_schema(Path(scenes) / "_common_metadata").with_metadata({UNISCHEMA_KEY: pickled})
    pq.write_metadata(stored, Path(scenes) / "_common_metadata")
    return scenes


def test_partition_columns_are_decoded_from_the_names_of_their_folders(partitioned: str) -> None:
    rows = read(partitioned, columns=["id", "matrix", "name", "is_even"])
    numbers = np.arange(12)
    np.testing.assert_array_equal(rows["id"], numbers)
    assert rows["id"].dtype == np.int32
    assert rows["name"].tolist() == [f"scene: {number}" for number in numbers]
    np.testing.assert_array_equal(rows["is_even"], numbers % 2 == 0)
    np.testing.assert_array_equal(rows["matrix"], [scene(number)["matrix"] for number in numbers])
    kept = read(partitioned, row_filter=in_set(["scene: 3", "scene: 7"], "name"))
    assert kept["id"].tolist() == [3, 7]

    def change(row: dict[str, Any]) -> dict[str, Any]:
        return {"length": np.int64(len(row["name"]))}

    spec = TransformSpec(change, edit_fields=[("length", np.int64, (), False)], selected_fields=["length"])
    assert sorted(read(partitioned, columns=["name"], transform=spec)["length"]) == [8] * 10 + [9] * 2


def test_partition_columns_do_not_hide_damage_of_other_columns(partitioned: str) -> None:
    path = next(Path(partitioned).glob("id=5/*/*/part-0.parquet"))
    chunk = pq.read_metadata(path).row_group(0).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    with ParquetFeed(partitioned, columns=["name", "score"], batch_size=4) as feed:
        status = path.stat()
        path.write_bytes(bytes(content))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(CorruptFileError, match=r"name=scene%3A 5/.*row group 0, column 'score' failed"):
            list(feed)


RESTORE = (
    "cpyspark.serializers\n_restore\n(S'UnischemaField'\n"
    "(S'name'\nS'numpy_dtype'\nS'shape'\nS'codec'\nS'nullable'\nt{}tR"
)
"""A field as pyspark before 3.3 made Python pickle every named tuple."""
REBUILD = "c{copyreg}\n_reconstructor\n(cpetastorm.unischema\nUnischemaField\nc{builtins}\ntuple\n{{}}tR"
OBJECT = "c{copyreg}\n_reconstructor\n({name}\nc{builtins}\nobject\nNtR"
PYTHON_2 = {"copyreg": "copy_reg", "builtins": "__builtin__"}
PYTHON_3 = {"copyreg": "copyreg", "builtins": "builtins"}


def pickled_by_hand(names: dict[str, str], field: str, text: str, length: str = "I3\n") -> bytes:
    """Return the pickle of a Unischema with the fields ``id``, ``matrix`` and ``name``, in opcodes of protocol 0."""
    codec, string = (
        OBJECT.format(name=name, **names)
        for name in ("cpetastorm.codecs\nNdarrayCodec", "cpyspark.sql.types\nStringType")
    )
    scalar = OBJECT.format(name="cpetastorm.codecs\nScalarCodec", **names) + f"(dS'_spark_type'\n{string}sb"
    fields = {
        "id": "(S'id'\ncnumpy\nint32\n(tNI00\nt",
        "matrix": f"(S'matrix'\ncnumpy\nfloat32\n(I2\n{length}t{codec}I00\nt",
        "name": f"(S'name'\n{text}(t{scalar}I00\nt",
    }
    items = "".join(f"(lS'{name}'\na{field.format(values)}aa" for name, values in fields.items())
    schema = OBJECT.format(name="cpetastorm.unischema\nUnischema", **names)
    return f"{schema}(dS'_name'\nS'Old'\nsS'_fields'\nccollections\nOrderedDict\n((l{items}tRsb.".encode()


def describe_by(scenes: str, pickled: bytes) -> None:
    path = Path(scenes) / "_common_metadata"
    schema = pq.read_schema(path)
    pq.write_metadata(schema.with_metadata({**schema.metadata, UNISCHEMA_KEY: pickled}), path)


UNICODE, STR = "cnumpy\nunicode_\n", "cnumpy\nstr_\n"
LENGTH = (
    "cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(S'i8'\nI0\nI1\ntR(I3\nS'<'\nNNNI-1\nI-1\nI0\ntb"
    "S'\\x03\\x00\\x00\\x00\\x00\\x00\\x00\\x00'\ntR"
)


@pytest.mark.parametrize(
    "pickled",
    [
        pickled_by_hand(PYTHON_2, RESTORE, UNICODE),
        b"\x80\x02" + pickled_by_hand(PYTHON_2, RESTORE, "c__builtin__\nunicode\n"),
        pickled_by_hand(PYTHON_2, REBUILD.format(**PYTHON_2), UNICODE, LENGTH),
        b"\x80\x03" + pickled_by_hand(PYTHON_3, RESTORE, STR),
        b"\x80\x04"
        + pickled_by_hand(PYTHON_3, REBUILD.format(**PYTHON_3), STR, LENGTH.replace("core", "_core")),
    ],
    ids=["pyspark on Python 2", "protocol 2", "no pyspark on Python 2", "pyspark on Python 3", "NumPy 2"],
)
def test_schemas_of_old_pythons_pysparks_and_numpys_are_read(scenes: str, pickled: bytes) -> None:
    describe_by(scenes, pickled)
    rows = read(scenes)
    np.testing.assert_array_equal(rows["matrix"], [scene(number)["matrix"] for number in range(12)])
    assert rows["name"].tolist() == [f"scene {number}" for number in range(12)]
    with make_reader(f"file://{scenes}", workers_count=1) as reader:
        assert sorted(row.name for row in reader) == sorted(rows["name"])


@pytest.mark.parametrize(
    "refused",
    [
        "cpyspark.serializers\n_restore\n(S'Row'\n(S'a'\nt(I1\nttR.",
        "cpyspark.serializers\nCloudPickleSerializer\n.",
        "c__builtin__\neval\n(S'1'\ntR.",
        "cnumpy\nload\n.",
        "cnumpy.core.multiarray\n_reconstruct\n.",
        "cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(S'O8'\nI0\nI1\ntRS'x'\ntR.",
        "cposix\nsystem\n(S'true'\ntR.",
    ],
)
def test_other_old_names_belong_to_no_unischema(scenes: str, refused: str) -> None:
    describe_by(scenes, refused.encode())
    with pytest.raises(DataError, match="belongs to no Unischema"):
        find_dataset(scenes, None)
