from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.launch.rank.environment import ALLOCATOR_VARIABLES

ROOT = Path(__file__).resolve().parents[4]
MIB = 1 << 20
FLOATS = 1024
ROWS_PER_GROUP = 2048  # 8 MiB
NUM_GROUPS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 MiB of rows whose first float is 1."""
    values = np.random.default_rng(0).random((ROWS_PER_GROUP * NUM_GROUPS, FLOATS), dtype=np.float32)
    values[:, 0] = 1
    offsets = np.arange(len(values) + 1, dtype=np.int32) * FLOATS
    table = pa.table({"x": pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))})
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    pq.write_table(table, path, row_group_size=ROWS_PER_GROUP, compression="none")
    return path.parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("shuffle", "gib", "allocator"),
    [
        (True, 0.5, "jemalloc"),
        (False, 0.5, "mimalloc"),
        *(
            pytest.param(shuffle, 10, allocator, marks=pytest.mark.slow)
            for shuffle, allocator in product((True, False), ("jemalloc", "mimalloc"))
        ),
    ],
)
def test_memory_of_reading_stays_within_its_bound_for_any_size_of_dataset(
    folder: Path, allocator: str, gib: float, shuffle: bool
) -> None:
    repeats = int(gib * 8)
    buffer_rows = 8192  # 32 MiB
    options = {"batch_size": 256, "shuffle_buffer_rows": buffer_rows, "read_ahead_bytes": 64 * MIB}
    variables = {"ARROW_DEFAULT_MEMORY_POOL": allocator}
    found = read_through(folder, repeats, {"shuffle": shuffle, **options}, variables)
    num_rows = ROWS_PER_GROUP * NUM_GROUPS * repeats
    assert found["rows"] == num_rows
    assert found["sum"] == num_rows
    bound = 64 * MIB + (buffer_rows * FLOATS * 4 if shuffle else 0)
    assert found["peak_bytes"] <= bound + 200 * MIB


@pytest.mark.timeout(120)
def test_planned_ranks_that_one_rank_reads_for_share_the_bound(folder: Path) -> None:
    options = {"rank": 0, "world_size": 1, "planned_ranks": 6, "batch_size": 64, "shuffle": False}
    found = read_through(
        folder, 4, {**options, "read_ahead_bytes": 96 * MIB}, {"ARROW_DEFAULT_MEMORY_POOL": "jemalloc"}
    )
    assert found["rows"] == found["sum"] == ROWS_PER_GROUP * NUM_GROUPS * 4
    assert found["peak_bytes"] <= (96 + 200) * MIB


def test_strings_of_a_dictionary_count_with_their_size_as_objects(tmp_path: Path) -> None:
    """In the file each string takes a byte and a quarter."""
    num_rows, repeats = 1 << 20, 6
    words = pa.array([f"word {number:04}" for number in range(1000)])
    numbers = np.arange(num_rows, dtype=np.int32) % len(words)
    table = pa.table({"x": words.take(pa.array(numbers))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1 << 16)
    bound = 32 * MIB
    found = read_through(tmp_path, repeats, {"batch_size": 256, "shuffle": False, "read_ahead_bytes": bound})
    assert found["rows"] == num_rows * repeats
    assert found["sum"] == 9 * num_rows * repeats
    assert found["peak_bytes"] <= bound + 200 * MIB


def read_through(
    folder: Path, repeats: int, options: dict[str, object], variables: Mapping[str, str] = ALLOCATOR_VARIABLES
) -> dict[str, float]:
    script = Path(__file__).with_name("memory_of_reading.py")
    answer = subprocess.run(
        [sys.executable, str(script), str(folder), str(repeats), json.dumps(options)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **variables},
    )
    found: dict[str, float] = json.loads(answer.stdout)
    return found
