from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data import ParquetDataset, ParquetFeed, RowFilter, scan_dataset
from sparkdl.errors import DataError

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


def test_row_groups_are_found_in_the_order_of_the_files(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10, 3], [], [20]])
    assert [(group.path, group.index, group.num_rows) for group in dataset.row_groups] == [
        ("part-00000.parquet", 0, 10),
        ("part-00000.parquet", 1, 3),
        ("part-00002.parquet", 0, 20),
    ]
    assert dataset.num_rows == 33


def test_range_of_integers_comes_from_the_footers(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10, 3], [20]])
    assert dataset.column("twice").value_range == (0, 64)
    assert dataset.column("half").value_range is None


SPECIAL = [
    *("y", "y.prev", "y.prev.x", "y.list", "y.list.element", "prev", "data", "y.data", "origin", "key_value"),
    *(
        "",
        ".",
        "..",
        " y",
        "`y`",
        '"y"',
        "y=1",
        "y/z",
        "%2E",
        "größe.m²",
        "schema",
        "fields",
        "_name",
        "class",
    ),
]
NAMES = st.sampled_from(SPECIAL) | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6)
NUM_ROWS = 6

SHAPES: Mapping[str, Callable[[int], list[Any]]] = {
    "number": lambda start: [*range(start, start + NUM_ROWS)],
    "text": lambda start: [f"{start + row} texts" for row in range(NUM_ROWS)],
    "array": lambda start: [[start + row, row] for row in range(NUM_ROWS)],
    "struct": lambda start: [
        {"prev": start, "list": {"element": [row]}, "data": b""} for row in range(NUM_ROWS)
    ],
    "image": lambda start: [
        {"origin": "", "height": 1, "width": 1, "nChannels": 1, "mode": 0, "data": bytes([start % 256])}
        for _ in range(NUM_ROWS)
    ],
}

IMAGE = pa.struct(
    [
        *(("origin", pa.string()), ("height", pa.int32()), ("width", pa.int32())),
        *(("nChannels", pa.int32()), ("mode", pa.int32()), ("data", pa.binary())),
    ]
)


def array_of(shape: str, start: int) -> pa.Array:
    return pa.array(SHAPES[shape](start), IMAGE if shape == "image" else None)


@settings(max_examples=60, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=6, unique=True), data=st.data())
def test_any_names_are_described_and_read_as_the_columns_that_they_name(
    names: list[str], data: st.DataObject
) -> None:
    shapes = {name: data.draw(st.sampled_from(list(SHAPES))) for name in names}
    values = {name: SHAPES[shape](100 * index) for index, (name, shape) in enumerate(shapes.items())}
    fed = [name for name in names if shapes[name] != "struct"]
    with TemporaryDirectory() as folder:
        columns = {name: array_of(shape, 100 * index) for index, (name, shape) in enumerate(shapes.items())}
        pq.write_table(pa.table(columns), f"{folder}/part.parquet", row_group_size=4)
        dataset = scan_dataset(folder, fed)
        for name in fed:
            column = dataset.column(name)
            is_number = shapes[name] == "number"
            assert column.value_range == ((values[name][0], values[name][-1]) if is_number else None)
            assert column.num_nulls == 0
            assert bool(column.object_bytes) == (shapes[name] in ("text", "image"))
        for name in fed:
            with ParquetFeed(dataset, columns=[name], batch_size=NUM_ROWS, shuffle=False) as feed:
                (batch,) = feed.epoch(0)
            expected = [row["data"] for row in values[name]] if shapes[name] == "image" else values[name]
            got = [value.tobytes() if shapes[name] == "image" else value for value in batch[name].tolist()]
            assert [*batch] == [name]
            assert got == expected
            if shapes[name] == "number":
                second = RowFilter([name], lambda columns, name=name: columns[name] == values[name][1])
                with ParquetFeed(dataset, columns=fed, batch_size=1, row_filter=second) as feed:
                    (batch,) = feed.epoch(0)
                assert [*batch] == fed
                assert batch[name].tolist() == [values[name][1]]


def read_all(folder: str) -> None:
    dataset = scan_dataset(folder)
    with ParquetFeed(dataset, batch_size=NUM_ROWS) as feed:
        list(feed.epoch(0))


def read_with_damaged_footers(folder: str, seed: int, num_damaged: int) -> None:
    """Read a file again and again, each time with other bytes in its footer; runs in a child process."""
    path = Path(folder, "part.parquet")
    whole = path.read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    choose = random.Random(seed)
    for _ in range(num_damaged):
        content = bytearray(whole)
        for _ in range(choose.randrange(1, 4)):
            content[choose.randrange(start, len(whole))] = choose.randrange(256)
        path.write_bytes(content)
        with contextlib.suppress(DataError):
            read_all(folder)
        print(choose.random())  # the damage before the last line ended the process


def in_child(code: str) -> subprocess.CompletedProcess[str]:
    """Run a function of this module in a process of its own, as damage may end it."""
    call = f"from tests.unit.data.dataset import test_footers as t; t.{code}"
    return subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, timeout=240, check=False
    )


def write_all_types(folder: Path) -> None:
    columns: dict[str, pa.Array] = {
        "int": pa.array(range(NUM_ROWS), pa.int32()),
        "long": pa.array(range(NUM_ROWS)),
        "byte": pa.array(range(NUM_ROWS), pa.uint8()),
        "decimal": pa.array([Decimal(row) for row in range(NUM_ROWS)], pa.decimal128(20, 2)),
        "flag": pa.array([True] * NUM_ROWS),
        "time": pa.array([row * 10**6 for row in range(NUM_ROWS)], pa.timestamp("us")),
        **{shape: array_of(shape, 0) for shape in ("text", "array", "image")},
    }
    pq.write_table(pa.table(columns), folder / "part.parquet", row_group_size=4)


def test_damaged_footers_never_end_the_process(tmp_path: Path) -> None:
    write_all_types(tmp_path)
    child = in_child(f"read_with_damaged_footers({str(tmp_path)!r}, seed=7, num_damaged=250)")
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.count("\n") == 250


def test_chunk_of_another_type_than_the_schemas_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"y": [1, 2, 3]}), path, store_schema=False)
    content = bytearray(path.read_bytes())
    type_of_chunk = content.rindex(
        b"\x15\x04\x19"
    )  # field 1 of the column's metadata: INT64; then its encodings
    content[type_of_chunk + 1] = 2
    path.write_bytes(content)
    child = in_child(f"read_all({str(tmp_path)!r})")
    assert "CorruptFileError" in child.stderr
    assert "a chunk holds INT32, and the schema says INT64. Write it again." in child.stderr


def test_columns_tell_instants_from_clock_times(tmp_path: Path) -> None:
    times = [datetime(2026, 1, 31, 12)]
    types = {
        "utc": pa.timestamp("us", "UTC"),
        "zone": pa.timestamp("ms", "Asia/Tokyo"),
        "array": pa.list_(pa.timestamp("us", "UTC")),
        "clock": pa.timestamp("us"),
        "clocks": pa.list_(pa.timestamp("us")),
    }
    columns = {name: [times if pa.types.is_list(type_) else times[0]] for name, type_ in types.items()}
    table = pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})
    pq.write_table(table, tmp_path / "a.parquet")
    found = scan_dataset(str(tmp_path), shapes={"array": (None,)}).columns
    assert [column.name for column in found if column.is_utc] == ["utc", "zone", "array"]
    # As Spark writes instants, unless spark.sql.parquet.outputTimestampType says otherwise.
    pq.write_table(table.select(["clock"]), tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert scan_dataset(str(tmp_path)).column("clock").is_utc


def test_views_and_extension_types_are_fed_as_what_they_store(tmp_path: Path) -> None:
    types = [
        (pa.uuid(), pa.array([b"0123456789abcdef"] * 2, pa.binary(16))),
        (pa.json_(), pa.array(['{"a": 1}', "[]"])),
        (
            pa.fixed_shape_tensor(pa.int16(), (2, 2)),
            pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.int16(), 4)),
        ),
    ]
    columns = {str(kind): pa.ExtensionArray.from_storage(kind, stored) for kind, stored in types}
    columns["text"] = pa.array(["a", "a text that is not kept inline"], pa.string_view())
    columns["bytes"] = pa.array([b"a", b"bytes that are not kept inline"], pa.binary_view())
    pq.write_table(pa.table(columns), tmp_path / "part-0.parquet")
    expected = [*(stored for _, stored in types), columns["text"], columns["bytes"]]
    with ParquetFeed(str(tmp_path), batch_size=2, shuffle=False) as feed:
        (batch,) = feed
    assert [batch[name].tolist() for name in columns] == [stored.to_pylist() for stored in expected]
