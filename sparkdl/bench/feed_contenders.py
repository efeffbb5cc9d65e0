"""Who reads in ``sparkdl bench feed``: each gives the batches of one pass over the files as tensors.

Runs in the process of the contender. Those that read ahead, sparkdl and Petastorm, take two reader threads;
Arrow's pool, in which all but torch decode columns, has two threads in each process. All give ``(rows, width)`` floats
and, where there are labels, those.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 256
NUM_THREADS = 2
READ_AHEAD_BYTES = 128 << 20
"""The bound that sparkdl's feed is given; its shuffle buffer comes in addition."""

Case: TypeAlias = Mapping[str, Any]
"""What :func:`sparkdl.bench.feed_files.write_table` returned, and ``shuffle_rows``: rows of the buffer or 0."""

Batches: TypeAlias = "Iterator[tuple[Tensor, ...]]"
Contender: TypeAlias = Callable[[], Batches]


def float_names(case: Case) -> list[str]:
    """The columns of single floats."""
    return [f"f{index}" for index in range(case["num_floats"])]


def sparkdl_feed(case: Case) -> Contender:
    """Our feed, under torch's face."""
    from sparkdl.data import ParquetFeed, scan_dataset
    from sparkdl.training.feed_dataset import FeedDataset

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
    """Petastorm's batch reader under its ``BatchedDataLoader``, which shuffles in a buffer of rows if asked to."""
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
    """A plain loop over row groups with pyarrow: a matrix is filled from each and cut into batches."""
    import torch

    def read() -> Batches:
        for arrays in _row_groups(case):
            for start in range(0, len(arrays[0]), BATCH_SIZE):
                yield tuple(torch.from_numpy(array[start : start + BATCH_SIZE]) for array in arrays)

    return read


def torch_loader(case: Case) -> Contender:
    """Torch's ``DataLoader`` with its default collation, over rows that lie in memory before."""
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
