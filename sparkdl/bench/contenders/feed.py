"""The contenders of ``sparkdl bench feed``, and the Parquet files that they read.

The readers return the batches of one pass over the files as tensors: floats of the shape ``(rows, width)`` and, if the
table has labels, the labels. The contenders that read ahead, sparkdl and Petastorm, use two reader threads. All
contenders but torch decode columns in the thread pool of Arrow, which has two threads in each process.

The files are written in the process that calls the benchmark. A trial runs in the process of the contender: it times
one pass over the files, or the training of the demo's network on them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sparkdl.bench.contenders.sessions import Trial

if TYPE_CHECKING:
    import torch
    from torch import Tensor


BATCH_SIZE = 256
NUM_THREADS = 2
READ_AHEAD_BYTES = 128 << 20
"""Limit on the memory that the feed of sparkdl reads ahead; the shuffle buffer comes in addition."""

Case: TypeAlias = Mapping[str, Any]
"""Settings that :func:`sparkdl.bench.contenders.feed.write_table` returned, and ``shuffle_rows``: rows of the shuffle
buffer, or 0."""

Batches: TypeAlias = "Iterator[tuple[Tensor, ...]]"
Contender: TypeAlias = Callable[[], Batches]


def float_names(case: Case) -> list[str]:
    """Return the names of the columns that hold one float per row."""
    return [f"f{index}" for index in range(case["num_floats"])]


def sparkdl_feed(case: Case) -> Contender:
    """The feed of sparkdl, as a dataset of torch."""
    from sparkdl.data import ParquetFeed, scan_dataset
    from sparkdl.loaders.feed_dataset import FeedDataset

    names = float_names(case)
    dataset = scan_dataset(case["folder"])

    def read() -> Batches:
        with ParquetFeed(
            dataset,
            columns={"x": names} if names else ["x", "label"],
            batch_size=BATCH_SIZE,
            shuffle=bool(case["shuffle_rows"]),
            shuffle_buffer_rows=case["shuffle_rows"] or None,
            num_threads=NUM_THREADS,
            read_ahead_bytes=READ_AHEAD_BYTES,
        ) as feed:
            for batch in FeedDataset(feed):
                yield tuple(batch.values())

    return read


def petastorm_loader(case: Case) -> Contender:
    """Petastorm's batch reader in its ``BatchedDataLoader``, which shuffles in a buffer of ``shuffle_rows`` rows."""
    import torch

    from sparkdl.data.petastorm.containment import install

    install()
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    names = float_names(case)
    url = Path(case["folder"]).as_uri()

    def read() -> Batches:
        reader = make_batch_reader(
            url,
            num_epochs=1,
            workers_count=NUM_THREADS,
            shuffle_row_groups=bool(case["shuffle_rows"]),
        )
        with BatchedDataLoader(
            reader, batch_size=BATCH_SIZE, shuffling_queue_capacity=case["shuffle_rows"]
        ) as loader:
            for batch in loader:
                if names:
                    yield (torch.stack([batch[name] for name in names], dim=1),)
                else:
                    yield batch["x"], batch["label"]

    return read


def arrow_loop(case: Case) -> Contender:
    """A plain loop over row groups with pyarrow, which fills a matrix from each row group and cuts it into batches."""
    import torch

    def read() -> Batches:
        for arrays in _row_groups(case):
            for start in range(0, len(arrays[0]), BATCH_SIZE):
                yield tuple(torch.from_numpy(array[start : start + BATCH_SIZE]) for array in arrays)

    return read


def torch_loader(case: Case) -> Contender:
    """Torch's ``DataLoader`` with its default collation, over rows that were loaded into memory beforehand."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    groups = list(_row_groups(case))
    dataset = TensorDataset(
        *(torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*groups, strict=True))
    )
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=bool(case["shuffle_rows"]))

    def read() -> Batches:
        for batch in loader:
            yield tuple(batch)

    return read


CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    "sparkdl": sparkdl_feed,
    "petastorm": petastorm_loader,
    "arrow": arrow_loop,
    "torch": torch_loader,
}


def _row_groups(case: Case) -> Iterator[tuple[np.ndarray[Any, Any], ...]]:
    import pyarrow.parquet as pq

    names = float_names(case)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    for path in sorted(Path(case["folder"]).glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for index in range(file.num_row_groups):
                table = file.read_row_group(index)
                if names:
                    matrix = np.empty((table.num_rows, len(names)), np.float32)
                    for column, name in enumerate(names):
                        matrix[:, column] = table.column(name).to_numpy()
                    yield (matrix,)
                else:
                    lists = table.column("x").combine_chunks()
                    values = lists.flatten().to_numpy().reshape(-1, case["list_length"])
                    yield values, table.column("label").to_numpy()


NUM_FILES = 4


@dataclass(frozen=True, kw_only=True)
class RandomTable:
    """A folder of Parquet files with random numbers.

    Attributes:
        num_rows: total number of rows of all files.
        num_floats: number of columns of one float each; 0 for one column of lists.
        list_length: number of floats in the list of each row, which also has a label from 0 to 9.
        rows_per_group: number of rows per row group.
    """

    num_rows: int
    num_floats: int = 0
    list_length: int = 0
    rows_per_group: int

    @property
    def width(self) -> int:
        """Number of floats per row."""
        return self.num_floats or self.list_length


TABLES = {
    "28 floats": RandomTable(num_rows=1_000_000, num_floats=28, rows_per_group=62_500),
    "list of 784 floats": RandomTable(num_rows=100_000, list_length=784, rows_per_group=5_000),
    "digits": RandomTable(num_rows=5_120, list_length=64, rows_per_group=1_280),
}
"""The tables, by name."""


def write_table(folder: Path, table: RandomTable, scale: float) -> dict[str, Any]:
    """Write a table with ``scale`` times its rows, and return its settings for the readers, as JSON can hold them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    random = np.random.default_rng(0)
    rows_of_file = max(1, round(table.num_rows * scale / NUM_FILES))
    rows_per_group = max(1, round(table.rows_per_group * scale))
    total = 0.0
    for number in range(NUM_FILES):
        values = random.random((rows_of_file, table.width), dtype=np.float32)
        total += float(values.sum(dtype=np.float64))
        columns: Mapping[str, Any]
        if table.num_floats:
            columns = {
                f"f{index}": np.ascontiguousarray(values[:, index]) for index in range(table.num_floats)
            }
        else:
            offsets = np.arange(rows_of_file + 1, dtype=np.int32) * table.list_length
            lists = pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))
            columns = {"x": lists, "label": random.integers(0, 10, rows_of_file)}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=rows_per_group)
    return {
        "folder": str(folder),
        "num_rows": rows_of_file * NUM_FILES,
        "num_floats": table.num_floats,
        "list_length": table.list_length,
        "sum": total,
    }


_TOLERANCE = 1e-5

# State of this process, which measures one case.
_start_bytes: dict[str, int] = {}
_verified: set[tuple[str, str]] = set()


class FeedTrial(Trial):
    """Passes of one contender over the files of one case.

    Args:
        contender: a key of :data:`sparkdl.bench.contenders.feed.CONTENDERS`.
        case: settings of the files, ``shuffle_rows``, and ``trains``: whether a model is trained on each batch.
    """

    def __init__(self, contender: str, case: Mapping[str, Any]) -> None:
        import pyarrow as pa
        import torch

        torch.set_num_threads(NUM_THREADS)
        pa.set_cpu_count(NUM_THREADS)
        _import_readers()
        self._case = case
        self._train = _make_training() if case["trains"] else None
        self._start_bytes = _start_bytes.setdefault(contender, _memory("VmRSS"))  # before anything is read
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
        self._read = CONTENDERS[contender](case)
        self._reading = (contender, str(case["folder"]))
        # A warm-up pass, once per process, which sums the values that are read and does all imports.
        self._is_first = self._reading not in _verified
        self.num_warm_ups = 1 if self._is_first else 0
        self._num_rows = 0
        self._waited_s: list[float] = []
        self._sum: float | None = None

    def run(self, operations: int) -> None:
        """Run this number of passes; the first pass sums the values that it reads, and its time does not count."""
        self._num_rows, waited_s = 0, 0.0
        for _ in range(operations):
            started = time.perf_counter()
            for batch in self._read():
                waited_s += time.perf_counter() - started
                self._num_rows += len(batch[0])
                if self._is_first:
                    self._sum = (self._sum or 0.0) + float(batch[0].double().sum())
                if self._train is not None:
                    self._train(batch[0], batch[1])
                started = time.perf_counter()
        self._waited_s.append(waited_s / operations)

    def check(self) -> None:
        """Raise an ``AssertionError`` if not every row was read once."""
        expected = self._case["num_rows"]
        assert self._num_rows % expected == 0, f"{self._num_rows} rows were read of {expected}"
        if self._is_first:
            total = self._case["sum"]
            assert self._sum is not None, "the first pass adds up what it reads"
            assert abs(self._sum - total) <= _TOLERANCE * total, (
                f"what was read adds up to {self._sum}, not {total}"
            )
            self._is_first = False
            _verified.add(self._reading)

    def result(self) -> dict[str, Any]:
        """Return the peak memory above that before the first read, and the seconds spent waiting for batches."""
        return {
            "peak_bytes": max(0, _memory("VmHWM") - self._start_bytes),
            "waited_s": self._waited_s[self.num_warm_ups :],
        }


def _import_readers() -> None:
    """Import the libraries of all contenders in every process, so that they do not count as memory of reading."""
    import_module("sparkdl.loaders.feed_dataset")
    for name in (
        "sparkdl.data.feed.epoch_reader",
        "sparkdl.data.petastorm.transform",
        "petastorm.pytorch",
    ):
        with suppress(ModuleNotFoundError):
            import_module(name)


def _make_training() -> Any:
    import torch

    from sparkdl.cli.demo import digits_cnn

    torch.manual_seed(0)
    model = digits_cnn()
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train(x: torch.Tensor, label: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model(x), label).backward()
        optimizer.step()

    return train


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"Linux reports {name} of every process")
