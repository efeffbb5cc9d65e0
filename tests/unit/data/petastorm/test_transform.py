"""Petastorm's ``TransformSpec`` and predicates on plain Parquet, compared with Petastorm's own batch reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.data import ParquetDataset, ParquetFeed, RowFilter
from sparkdl.data.petastorm.containment import install
from sparkdl.errors import DataError, ParamError

install()
from petastorm import make_batch_reader  # noqa: E402
from petastorm.predicates import in_lambda, in_negate, in_reduce, in_set  # noqa: E402
from petastorm.transform import TransformSpec, edit_field  # noqa: E402

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


def read(source: Any, **options: Any) -> dict[str, np.ndarray]:
    with ParquetFeed(source, **{"batch_size": 7, "shuffle": False, **options}) as feed:
        batches = list(feed.epoch(0))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def add_columns(frame: pd.DataFrame) -> pd.DataFrame:
    frame["sum"] = [float(vector.sum()) for vector in frame["vector"]]
    frame["pair"] = [np.array([number, -number]) for number in frame["id"]]
    frame["half"] = frame["half"] * 4
    return frame.drop(columns=["twice"])


SPEC = TransformSpec(
    add_columns,
    edit_fields=[edit_field("sum", np.float32, ()), edit_field("pair", np.int64, (2,))],
    removed_fields=["twice", "grid"],
)


def test_a_transform_gives_what_petastorms_batch_reader_gives(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10, 3], [20]])
    rows = read(dataset, transform=SPEC)
    assert list(rows) == ["id", "half", "is_even", "vector", "sum", "pair"]
    with make_batch_reader(
        f"file://{dataset.url}",
        schema_fields=["id", "twice", "half", "is_even", "vector"],
        workers_count=1,
        shuffle_row_groups=False,
        transform_spec=TransformSpec(add_columns, SPEC.edit_fields, ["twice"]),
    ) as reader:
        batches = [batch._asdict() for batch in reader]
    for name, values in rows.items():
        np.testing.assert_array_equal(values, np.concatenate([batch[name] for batch in batches]))
    assert rows["sum"].dtype == np.float32


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_transformed_row_comes_once_whatever_the_order_and_cache(
    write_dataset: WriteDataset, world_size: int
) -> None:
    dataset = write_dataset([[10, 3], [20]])
    for cache in (None, "memory"):
        ids = []
        for rank in range(world_size):
            with ParquetFeed(
                dataset,
                transform=SPEC,
                columns={"pair": "pair", "id": "id"},
                batch_size=4,
                rank=rank,
                world_size=world_size,
                cache=cache,
            ) as feed:
                for epoch in range(2):
                    for batch in feed.epoch(epoch):
                        np.testing.assert_array_equal(batch["pair"], np.outer(batch["id"], [1, -1]))
                        ids.append(batch["id"])
        assert np.bincount(np.concatenate(ids)).tolist() == [2] * 33


def test_selected_fields_choose_and_order_the_columns(write_dataset: WriteDataset) -> None:
    rows = read(write_dataset([[5]]), transform=TransformSpec(selected_fields=["half", "id"]))
    assert list(rows) == ["half", "id"]
    np.testing.assert_array_equal(rows["id"], np.arange(5))


def test_a_transform_takes_the_columns_that_are_named_and_no_others(
    write_dataset: WriteDataset, tmp_path: Path
) -> None:
    def add(frame: pd.DataFrame) -> pd.DataFrame:
        assert sorted(frame.columns) == ["half", "id"]
        return frame.assign(sum=frame["half"] + frame["id"])

    spec = TransformSpec(add, edit_fields=[edit_field("sum", np.float64, ())], removed_fields=["half"])
    dataset = write_dataset([[5]])
    other = tmp_path / "other"
    other.mkdir()
    # A column that cannot be fed does no harm unless it is requested.
    table = pq.read_table(dataset.url).append_column(
        "m", pa.array([[("k", 1)]] * 5, pa.map_(pa.string(), pa.int8()))
    )
    pq.write_table(table, other / "a.parquet")
    row_filter = RowFilter("twice", lambda values: values["twice"] > 2)
    for source in (dataset, dataset.url, other):
        rows = read(source, transform=spec, columns=["half", "id"], row_filter=row_filter)
        assert list(rows) == ["id", "sum"]
        assert rows["sum"].tolist() == [1.5 * number for number in (2, 3, 4)]
    chosen = TransformSpec(add, spec.edit_fields, selected_fields=["sum"])
    assert list(read(dataset, transform=chosen, columns=["half", "id"])) == ["sum"]
    with make_batch_reader(
        f"file://{dataset.url}", schema_fields=["half", "id"], workers_count=1, transform_spec=spec
    ) as reader:
        assert set(next(reader)._fields) == {"id", "sum"}


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda frame: frame, "transform is a function; give a petastorm.transform.TransformSpec"),
        (3, "transform is a int; give a petastorm"),
    ],
)
def test_transform_that_is_no_transform_spec_is_refused(
    write_dataset: WriteDataset, transform: Any, message: str
) -> None:
    with pytest.raises(ParamError, match=message):
        ParquetFeed(write_dataset([[5]]), batch_size=2, transform=transform)


def test_transform_gets_nested_arrays_in_their_shape(write_dataset: WriteDataset) -> None:
    def turn(frame: pd.DataFrame) -> pd.DataFrame:
        assert frame["grid"][0].shape == (2, 2)
        return frame.assign(grid=[grid.T for grid in frame["grid"]])

    dataset = write_dataset([[5]])
    turned = read(dataset, transform=TransformSpec(turn), columns=["grid"])["grid"]
    np.testing.assert_array_equal(turned, read(dataset, columns=["grid"])["grid"].transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda frame: frame[:2], "returned 2 rows for a DataFrame of 5 rows; .* row_filter"),
        (lambda frame: None, "returned NoneType for a DataFrame"),
        (lambda frame: 1 / 0, "failed: ZeroDivisionError: division by zero"),
        (lambda frame: frame.drop(columns="half"), "returned no column 'half', only id, twice"),
        (lambda frame: frame.assign(half="much"), "'half' holds .*, which cannot be converted to float64"),
        (lambda frame: frame.assign(vector=[np.zeros(2)] * 5), r"'vector' has .* shape \(2,\) in row 0"),
        (lambda frame: frame.assign(vector=[None] * 5), "'vector' has no value in row 0"),
    ],
)
def test_transform_that_contradicts_its_spec_is_an_error_with_file_row_group_and_column(
    write_dataset: WriteDataset, function: Callable[[pd.DataFrame], Any], message: str
) -> None:
    dataset = write_dataset([[5]])
    with pytest.raises(DataError, match=rf"part-00000\.parquet, row group 0 failed: .*{message}"):
        read(dataset, transform=TransformSpec(function))


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (in_set({3, 30, 99}, "id"), [3, 30]),
        (in_lambda(["id", "is_even"], lambda number, is_even: number > 27 and is_even), [28, 30, 32]),
        (in_lambda(["vector"], lambda vector, least: vector[2] > least, 90), [31, 32]),
        (in_negate(in_lambda(["id"], lambda number: number >= 2)), [0, 1]),
        (in_reduce([in_set(range(5), "id"), in_set([True], "is_even")], all), [0, 2, 4]),
        (RowFilter(["id"], lambda values: values["id"] % 10 == 9), [9, 19, 29]),
    ],
)
def test_predicates_choose_rows_and_a_transform_sees_only_those(
    write_dataset: WriteDataset, predicate: Any, expected: list[int]
) -> None:
    seen: list[int] = []

    def note(frame: pd.DataFrame) -> pd.DataFrame:
        seen.extend(frame["id"])
        return frame

    dataset = write_dataset([[10, 3], [20]])
    rows = read(dataset, row_filter=predicate, transform=TransformSpec(note), num_threads=1)
    assert rows["id"].tolist() == expected
    assert seen == expected
    assert read(dataset, row_filter=predicate, columns=["twice"])["twice"].tolist() == [
        2 * n for n in expected
    ]
