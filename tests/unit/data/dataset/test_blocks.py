"""Blocks: columns of one dtype as one matrix, which the extension fills."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sparkdl import _native
from sparkdl.data import Column
from sparkdl.data.dataset.blocks import BlockLayout
from sparkdl.errors import ParamError

_DTYPES = ("bool", "uint8", "float16", "int32", "float32", "int64", "float64")


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 2), (1, 3), (64, 64), (200, 130)])
def test_a_matrix_holds_each_column_at_its_place(dtype: str, num_rows: int, width: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 100, (num_rows, width)).astype(dtype)
    names = [f"c{index}" for index in range(width)]
    table = pa.table({name: pa.array(numbers[:, index]) for index, name in enumerate(names)})
    layout = BlockLayout({"x": [Column(name=name, dtype=dtype) for name in names]})
    (matrix,) = layout.pack(table)
    assert matrix.dtype == numbers.dtype
    np.testing.assert_array_equal(matrix, numbers)


def test_columns_that_do_not_fit_a_matrix_are_refused() -> None:
    column = np.zeros(4, np.float32)
    for matrix in (np.zeros((4, 3), np.float32), np.zeros((5, 2), np.float32), np.zeros((4, 2), np.int32)):
        with pytest.raises(ParamError, match="matrix"):
            _native.join_columns([column, column], matrix)
    with pytest.raises(TypeError):
        _native.join_columns([column, column], np.zeros((2, 4), np.float32).T)


def test_chunks_that_arrow_cannot_join_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(_: object) -> None:  # as above 2 GiB of strings
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(pa, "concat_arrays", overflow)
    values: dict[str, tuple[Column, list[object]]] = {
        "text": (Column(name="text", dtype="object", kind="string"), ["a", "", "bc"]),
        "pair": (Column(name="pair", dtype="int64", shape=(2,)), [[1, 2], [3, 4], [5, 6]]),
        "flag": (Column(name="flag", dtype="bool"), [True, False, True]),
    }
    chunks = {name: pa.chunked_array([items[:1], items[1:]]) for name, (_, items) in values.items()}
    layout = BlockLayout([column for column, _ in values.values()])
    batch = layout.unpack(layout.pack(pa.table(chunks)))
    assert {name: array.tolist() for name, array in batch.items()} == {
        name: items for name, (_, items) in values.items()
    }
