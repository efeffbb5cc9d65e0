"""A file that only one rank cannot read ends the training of all ranks; each error names file, row group and column."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data import ParquetDataset
from sparkdl.training.spec import TrainingSpec
from sparkdl.training.trainer import train
from tests.run_ranks import run_ranks
from tests.training.scenes.faulty_files import BAD_FILE, register
from tests.training.scenes.training_scenes import make_spec, write_dataset

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment

DEADLINE_S = 60.0
SHORT_DEADLINE_S = 8.0


def failures_of_training(
    environment: RankEnvironment, spec: TrainingSpec, datasets: list[ParquetDataset]
) -> list[tuple[str, str, float]]:
    """The type and message of the error of training on each dataset on this rank, and the seconds until then."""
    failures = []
    for number, dataset in enumerate(datasets):
        timeout_s = DEADLINE_S
        if dataset.url.startswith("faulty:"):
            register("expired" if number % 2 else "silent")
            timeout_s = SHORT_DEADLINE_S
        with environment.open(name=f"training-{number}", timeout_s=timeout_s) as communicator:
            communicator.barrier()
            started = time.monotonic()
            try:
                train(copy.deepcopy(spec), communicator=communicator, dataset=dataset, keep=id)
            except Exception as error:
                failures.append((type(error).__name__, str(error), time.monotonic() - started))
    return failures


def damaged(dataset: ParquetDataset, path: Path) -> None:
    chunk = pq.read_metadata(path).row_group(5).column(0)
    content = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(bytes(content))


def vanished(dataset: ParquetDataset, path: Path) -> None:
    path.rename(path.with_suffix(".away"))


def retyped(dataset: ParquetDataset, path: Path) -> None:
    table = pq.read_table(path)
    cast = table["x"].cast(pa.list_(pa.float64()))
    pq.write_table(table.set_column(0, "x", cast), path, row_group_size=5)


def lengthened(dataset: ParquetDataset, path: Path) -> None:
    table = pq.read_table(path)
    longer = pa.array([[*row, 0.0] for row in table["x"].to_pylist()], pa.list_(pa.float32()))
    pq.write_table(table.set_column(0, "x", longer), path, row_group_size=5)


def shortened(dataset: ParquetDataset, path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 23), path, row_group_size=5)


def rewritten(dataset: ParquetDataset, path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(1, "y", pa.array([0] * 30)), path, row_group_size=5)


def test_both_ranks_end_with_the_error_of_the_rank_that_read_the_bad_file(tmp_path: Path) -> None:
    expected = {
        damaged: ("CorruptFileError", r"part-1.parquet, row group 5, column 'x' failed"),
        vanished: ("FileVanishedError", "part-1.parquet, row group 0 failed"),
        retyped: ("ColumnMismatchError", "part-1.parquet, row group 0 failed: Column 'x' holds"),
        lengthened: ("ColumnMismatchError", "part-1.parquet, row group 0 failed: Column 'x' has arrays of 5"),
        rewritten: ("FileChangedError", "part-1.parquet, row group 0 failed: it was written again"),
        shortened: ("FileChangedError", "part-1.parquet, row group 4 failed: it has 3 rows now"),
    }
    datasets = []
    for number, spoil in enumerate(expected):
        folder = tmp_path / str(number)
        write_dataset(folder, 30)
        (folder / "part-0.parquet").rename(folder / "part-1.parquet")
        dataset = write_dataset(folder, 30)  # 60 rows: rank 0 has the first file, rank 1 the second
        spoil(dataset, folder / "part-1.parquet")
        # Without versions, as on filesystems without modification times; otherwise the error is about the version.
        datasets.append(dataset if spoil is rewritten else replace(dataset, versions={}))
    failures = run_ranks(2, failures_of_training, make_spec(shuffle=False), datasets)
    for number, (kind, message) in enumerate(expected.values()):
        (waiting, told, waited_s), (reading, said, _) = failures[0][number], failures[1][number]
        assert (reading, message in said) == (kind, True), said
        assert waiting == "CommunicatorAbortedError"
        assert kind in told
        assert message in told
        assert waited_s < DEADLINE_S / 2


def test_rank_that_cannot_read_its_file_names_it_before_the_others_time_out(tmp_path: Path) -> None:
    write_dataset(tmp_path, 30)
    (tmp_path / "part-0.parquet").rename(tmp_path / BAD_FILE)
    dataset = replace(write_dataset(tmp_path, 30), url=f"faulty://{tmp_path}")
    expected = (
        ("DataError", f"{BAD_FILE}, row group 0 took longer than {SHORT_DEADLINE_S / 2:g} s"),
        ("StoreAccessError", f"{BAD_FILE}, row group 0 failed: the credentials have expired"),
    )
    failures = run_ranks(2, failures_of_training, make_spec(shuffle=False), [dataset] * 2)
    for (kind, message), (waiting, told, _), (reading, said, _) in zip(expected, *failures, strict=True):
        assert (reading, message in said) == (kind, True), said
        assert (waiting, message in told) == ("CommunicatorAbortedError", True), told
