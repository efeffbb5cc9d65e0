"""The contenders of ``sparkdl bench feed``, and the Parquet files that they read.

The readers return the batches of one pass over the files as tensors: numbers of the shape ``(rows, width)`` and, if
the table has labels, the labels. The contenders that read ahead, sparkdl and Petastorm, use two reader threads, and
Streaming two worker processes. Those that read Parquet decode columns in the thread pool of Arrow, which has two
threads in each process. ``read_table`` is the limit for the others: it decodes the files at once, and returns a table.

The files are written in the process that calls the benchmark. A trial runs in the process of the contender: it times
one pass over the files, or the training of the demo's network on them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sparkdl.bench.contenders.sessions import Trial
from sparkdl.host_memory import host_memory

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from torch.utils.data import DataLoader


BATCH_SIZE = 256
NUM_THREADS = 2
READ_AHEAD_BYTES = 128 << 20
"""Limit on the memory that the feed of sparkdl reads ahead; the shuffle buffer comes in addition."""

Case: TypeAlias = Mapping[str, Any]
"""Settings that :func:`sparkdl.bench.contenders.feed.write_table` returned, and ``shuffle_rows``: rows of the shuffle
buffer, or 0."""

Batches: TypeAlias = "Iterator[tuple[Any, ...]]"
"""Batches of tensors, or one table of Arrow."""

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


def whole_table(case: Case) -> Contender:
    """The decoding of all files at once by pyarrow, without batches."""
    import pyarrow.parquet as pq

    def read() -> Batches:
        yield (pq.read_table(case["folder"]),)

    return read


def datasets_loop(case: Case) -> Contender:
    """A loop over a ``Dataset`` of Hugging Face, which maps Arrow files that it made from the Parquet files beforehand.

    It yields Arrow tables, its fastest format. A shuffled dataset reads the rows in an order drawn over all of them.
    """
    import torch
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    files = [str(path) for path in _files(case)]
    dataset = Dataset.from_parquet(files, cache_dir=f"{case['folder']}-datasets").with_format("arrow")
    seeds = iter(range(1 << 30))

    def read() -> Batches:
        rows = dataset.shuffle(seed=next(seeds), keep_in_memory=True) if case["shuffle_rows"] else dataset
        for table in rows.iter(BATCH_SIZE):
            yield tuple(torch.from_numpy(array) for array in _arrays(table, case))

    return read


def streaming_loader(case: Case) -> Contender:
    """Mosaic's ``StreamingDataset`` in a DataLoader of two worker processes, on shards that were written beforehand."""
    loader = _streaming_loader(
        case["folder"], case["dtype"], case["num_floats"], case["list_length"], bool(case["shuffle_rows"])
    )

    def read() -> Batches:
        for batch in loader:
            yield (batch["x"], batch["label"]) if "label" in batch else (batch["x"],)

    return read


@cache  # the workers stay from turn to turn
def _streaming_loader(
    folder: str, dtype: str, num_floats: int, list_length: int, shuffles: bool
) -> DataLoader[Any]:
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    local = f"{folder}-streaming"
    if not Path(local).exists():
        columns = {"x": f"ndarray:{dtype}:{num_floats or list_length}"}
        if list_length:
            columns["label"] = "int64"
        case = {"folder": folder, "num_floats": num_floats, "list_length": list_length}
        with MDSWriter(out=local, columns=columns) as writer:
            for arrays in _row_groups(case):
                for row in zip(*arrays, strict=True):
                    writer.write(dict(zip(columns, row, strict=True)))
    dataset = StreamingDataset(local=local, shuffle=shuffles, batch_size=BATCH_SIZE, num_canonical_nodes=1)
    return DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_THREADS, persistent_workers=True)


CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    "sparkdl": sparkdl_feed,
    "petastorm": petastorm_loader,
    "arrow": arrow_loop,
    "read_table": whole_table,
    "torch": torch_loader,
    "datasets": datasets_loop,
    "streaming": streaming_loader,
}


def _files(case: Case) -> list[Path]:
    return sorted(Path(case["folder"]).glob("*.parquet"))


def _row_groups(case: Case) -> Iterator[tuple[np.ndarray[Any, Any], ...]]:
    import pyarrow.parquet as pq

    for path in _files(case):
        with pq.ParquetFile(path) as file:
            for index in range(file.num_row_groups):
                yield _arrays(file.read_row_group(index), case)


def _arrays(table: pa.Table, case: Case) -> tuple[np.ndarray[Any, Any], ...]:
    """Return the rows of a table as a matrix of its columns, or as the lists and the labels."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    names = float_names(case)
    if names:
        matrix = np.empty((table.num_rows, len(names)), np.float32)
        for column, name in enumerate(names):
            matrix[:, column] = table.column(name).to_numpy()
        return (matrix,)
    values = table.column("x").combine_chunks().flatten().to_numpy().reshape(-1, case["list_length"])
    return values, table.column("label").to_numpy()


NUM_FILES = 4


@dataclass(frozen=True, kw_only=True)
class RandomTable:
    """A folder of Parquet files with random numbers.

    Attributes:
        num_rows: total number of rows of all files.
        num_floats: number of columns of one float each; 0 for one column of lists.
        list_length: number of values in the list of each row, which also has a label from 0 to 9.
        dtype: type of the values in lists.
        below: for lists of integers, the upper bound of the values; floats are below 1.
        rows_per_group: number of rows per row group.
    """

    num_rows: int
    num_floats: int = 0
    list_length: int = 0
    dtype: str = "float32"
    below: int = 1
    rows_per_group: int

    @property
    def width(self) -> int:
        """Number of values per row."""
        return self.num_floats or self.list_length


TABLES = {
    "28 floats": RandomTable(num_rows=1_000_000, num_floats=28, rows_per_group=62_500),
    "list of 784 floats": RandomTable(num_rows=100_000, list_length=784, rows_per_group=5_000),
    "images": RandomTable(
        num_rows=50_000, list_length=3 * 32 * 32, dtype="uint8", below=256, rows_per_group=2_500
    ),
    "tokens": RandomTable(
        num_rows=50_000, list_length=1_024, dtype="int32", below=32_000, rows_per_group=2_500
    ),
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
        shape = (rows_of_file, table.width)
        values: np.ndarray[Any, Any] = (
            random.random(shape, dtype=np.float32)
            if table.dtype == "float32"
            else random.integers(0, table.below, shape, dtype=table.dtype)
        )
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
        "dtype": table.dtype,
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
        case: settings: those of the files, ``shuffle_rows``, and ``trains`` (whether a model is trained on each batch).
    """

    def __init__(self, contender: str, case: Mapping[str, Any]) -> None:
        import pyarrow as pa
        import torch

        torch.set_num_threads(NUM_THREADS)
        pa.set_cpu_count(NUM_THREADS)
        _import_readers(contender)
        self._case = case
        self._train = _make_training() if case["trains"] else None
        self._start_bytes = _start_bytes.setdefault(
            contender, host_memory().process_bytes
        )  # before anything is read
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
        self._read = CONTENDERS[contender](case)
        self._reading = (contender, str(case["folder"]))
        # A warm-up pass, once per process, which sums the values that are read and does all imports.
        self._is_first = self._reading not in _verified
        self.num_warm_ups = 1 if self._is_first else 0
        self._num_rows = 0
        self._waited_s: list[float] = []
        self._cpu_s: list[float] = []
        self._sum: float | None = None

    def run(self, operations: int) -> None:
        """Run this number of passes; the first pass sums the values that it reads, and its time does not count."""
        self._num_rows, waited_s = 0, 0.0
        cpu_started = time.process_time()
        for _ in range(operations):
            started = time.perf_counter()
            for batch in self._read():
                waited_s += time.perf_counter() - started
                self._num_rows += len(batch[0])
                if self._is_first:
                    self._sum = (self._sum or 0.0) + _sum_of(batch[0])
                if self._train is not None:
                    self._train(batch[0], batch[1])
                started = time.perf_counter()
        self._waited_s.append(waited_s / operations)
        self._cpu_s.append((time.process_time() - cpu_started) / operations)

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
        """Return the peak memory above that before the first read, and the seconds of every pass.

        ``waited_s`` are those spent waiting for batches, and ``cpu_s`` those of the processor, in all threads.
        """
        return {
            "peak_bytes": max(0, host_memory().peak_bytes - self._start_bytes),
            "waited_s": self._waited_s[self.num_warm_ups :],
            "cpu_s": self._cpu_s[self.num_warm_ups :],
        }


def _sum_of(values: Any) -> float:
    """Return the sum of the values of a tensor, or of a table in its columns but the labels."""
    if not hasattr(values, "column_names"):
        return float(values.double().sum())
    arrays = (
        chunk.flatten() if name == "x" else chunk
        for name in values.column_names
        if name != "label"
        for chunk in values.column(name).chunks
    )
    return float(sum(array.to_numpy().sum(dtype=np.float64) for array in arrays))


def _import_readers(contender: str) -> None:
    """Import the libraries of the contenders, so that they do not count as memory of reading.

    Those of sparkdl and Petastorm are imported in every process, and the large other ones where they are used.
    """
    import_module("sparkdl.loaders.feed_dataset")
    for name in (
        "sparkdl.data.feed.epoch_reader",
        "sparkdl.data.petastorm.transform",
        "petastorm.pytorch",
        *{"datasets": ("datasets",), "streaming": ("streaming",)}.get(contender, ()),
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
