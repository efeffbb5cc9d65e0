"""Feeds in torch's interfaces: :class:`FeedDataset` for a DataLoader, and the loader of ``make_spark_converter``.

Batches are tensors over the memory of the feed's arrays. A feed reads ahead in its own threads, so a DataLoader around
it needs no workers.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from sparkdl.data import BlendedFeed, ParquetFeed
from sparkdl.data.feed.row_stream import Batch, RowStream, num_rows, slice_batch
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from sparkdl.data import ParquetDataset

logger = logging.getLogger(__name__)


class FeedBatch(dict[str, Any]):
    """A batch by column name. By this type torch's ``default_collate`` distinguishes a batch from a sample."""


def _refuse_to_join(batch: list[FeedBatch], **_: Any) -> NoReturn:
    num_rows = len(next(iter(batch[0].values()), ()))
    raise ParamError(
        f"A DataLoader was about to join {len(batch)} batches of a feed, of {num_rows} rows each, into one. A "
        "FeedDataset gives whole batches: write DataLoader(FeedDataset(feed), batch_size=None), and give the feed "
        "the batch_size."
    )


def _refuse_joining() -> None:
    """Make torch's ``default_collate`` refuse to join batches, by its map for custom types, which torch documents.

    The map is in a private module of torch; if a release has moved it, batches are joined, and a warning is logged.
    """
    try:
        functions = import_module("torch.utils.data._utils.collate").default_collate_fn_map
        functions[FeedBatch] = _refuse_to_join
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning(
            "This release of torch cannot be told that a FeedDataset gives whole batches (%s): a DataLoader without "
            "batch_size=None will make batches of batches.",
            error,
        )


_refuse_joining()


class FeedDataset(IterableDataset[dict[str, Any]]):
    """The batches of a feed as dicts of tensors: ``DataLoader(FeedDataset(feed), batch_size=None)``.

    Each iteration yields the feed's current epoch and advances the feed to the next one. Tensors share memory with the
    feed's arrays; columns for which torch has no dtype, such as strings, dates and timestamps, stay arrays. A
    DataLoader still tries to make tensors of dates and timestamps, and fails; with ``collate_fn=lambda batch: batch``
    it leaves batches as they are. Without ``batch_size=None`` a DataLoader would make batches of batches, with one more
    dimension; its default collate function raises a :class:`~sparkdl.errors.ParamError` instead.

    Args:
        feed: a :class:`~sparkdl.data.ParquetFeed` or a blend of them; the caller closes it.
    """

    def __init__(self, feed: ParquetFeed | BlendedFeed) -> None:
        self._feed = feed

    def __len__(self) -> int:
        """Return the number of batches of the next iteration."""
        return len(self._feed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of the current epoch.

        Raises:
            ParamError: if called in a worker process of a DataLoader.
        """
        if get_worker_info() is not None:
            raise ParamError(
                "A FeedDataset was given to a DataLoader with num_workers above 0, where every worker would give all "
                "rows once more. Leave num_workers at 0: the feed reads ahead in threads of its own (num_threads)."
            )
        for batch in self._feed:
            yield FeedBatch((name, as_tensor(array)) for name, array in batch.items())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that the next iteration yields.

        Raises:
            ParamError: if the feed is a blend, which runs continuously through the epochs of its feeds.
        """
        if isinstance(self._feed, BlendedFeed):
            raise ParamError(
                "A blend has no epochs of its own, so its epoch cannot be chosen. Do not call set_epoch on it."
            )
        self._feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the feed's position; see :meth:`sparkdl.data.ParquetFeed.state`."""
        return self._feed.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see :meth:`sparkdl.data.ParquetFeed.resume`."""
        self._feed.resume(state)


def as_tensor(array: npt.NDArray[Any]) -> Tensor | npt.NDArray[Any]:
    """Return an array as a tensor over its memory, or as it is where torch has no dtype for it."""
    return torch.from_numpy(array) if array.dtype.kind in "biuf" else array


_CACHES: dict[str | None, Literal["memory", "disk"] | None] = {
    None: None,
    "null": None,
    "memory": "memory",
    "local-disk": "disk",
    "disk": "disk",
}


class ConverterLoader:
    """Batches of one rank; a context manager that closes its readers.

    See :meth:`sparkdl.data.converter.SparkDatasetConverter.make_torch_dataloader` for the arguments.

    Raises:
        ParamError: if an argument is out of range or contradicts another one.
        DataError: if a column does not exist.
        ShardingError: if there are fewer rows than ranks.
    """

    def __init__(
        self,
        dataset: ParquetDataset,
        *,
        batch_size: int,
        num_epochs: int | None,
        num_threads: int,
        buffer_rows: int | None,
        rank: int | None,
        world_size: int | None,
        shuffle: bool,
        seed: int,
        columns: Sequence[str] | None,
        row_filter: Any,
        transform: Any,
        cache: str | None,
        cache_folder: str | None,
        cache_limit_bytes: int | None,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ParamError(
                f"cur_shard is {rank} and shard_count {world_size}; give both, or neither to read all rows."
            )
        if num_epochs is not None and num_epochs < 1:
            raise ParamError(f"num_epochs must be at least 1, or None for no end; got {num_epochs}.")
        if cache not in _CACHES:
            raise ParamError(f"cache_type must be 'memory', 'local-disk' or None, got {cache!r}.")
        if buffer_rows and not shuffle:
            raise ParamError(
                "shuffling_queue_capacity shuffles rows, which is done only where row groups are shuffled too. Set "
                "shuffle_row_groups=True, or the capacity to 0."
            )
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ParamError(f"cur_shard must be in [0, {world_size}), which is shard_count; got {rank}.")
        _check_at_least(1, workers_count=num_threads, batch_size=batch_size)
        _check_at_least(0, shuffling_queue_capacity=buffer_rows)
        _check_at_least(1, cache_size_limit=cache_limit_bytes)
        if _CACHES[cache] == "disk" and cache_folder is not None and not Path(cache_folder).is_dir():
            raise ParamError(f"cache_location must be a folder that exists, got {cache_folder!r}.")
        limit: dict[str, Any] = {} if cache_limit_bytes is None else {"cache_limit_bytes": cache_limit_bytes}
        self._rank, self._num_epochs = rank or 0, num_epochs
        self._batch_size = batch_size
        self._feed = ParquetFeed(
            dataset,
            columns=columns,
            rank=self._rank,
            world_size=world_size or 1,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_threads=num_threads,
            shuffle_buffer_rows=1 if buffer_rows == 0 else buffer_rows,
            row_filter=row_filter,
            transform=transform,
            cache=_CACHES[cache],
            cache_folder=cache_folder,
            **limit,
        )
        self._stream = RowStream("converter", self._feed)
        self._epochs_begun = 0

    def __len__(self) -> int:
        """Return the number of batches of all epochs, the same on every rank.

        Raises:
            TypeError: if ``num_epochs`` is None, so that the batches do not end.
        """
        if self._num_epochs is None:
            raise TypeError("A loader without num_epochs has no length.")
        return self._num_epochs * self._feed.steps_per_epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches of tensors, or of arrays where torch has no dtype for a column.

        A second iteration continues with the epochs after those of the first.

        Raises:
            DataError: if a file cannot be read; the message names file and row group.
        """
        batches = self._endless() if self._num_epochs is None else self._epochs(self._num_epochs)
        for batch in batches:
            yield {name: as_tensor(array) for name, array in batch.items()}

    def close(self) -> None:
        """Stop the reader threads; further calls do nothing."""
        self._stream.close()
        self._feed.close()

    def __enter__(self) -> ConverterLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _endless(self) -> Iterator[Batch]:
        while True:
            parts = self._stream.take(self._batch_size)
            yield parts[0] if len(parts) == 1 else _joined(parts)

    def _epochs(self, num_epochs: int) -> Iterator[Batch]:
        begun = self._epochs_begun
        for epoch in range(begun, begun + num_epochs):
            self._epochs_begun = epoch + 1
            yield from self._one_epoch(epoch)

    def _one_epoch(self, epoch: int) -> Iterator[Batch]:
        last = self._feed.steps_per_epoch - 1
        # The mean over an empty batch is NaN; a shard without rows in the last step saves one row for it.
        saves_a_row = not self._feed.rows_in_step(last)[self._rank] and self._batch_size > 1
        saved: Batch | None = None
        for step, batch in enumerate(self._feed.epoch(epoch)):
            if saves_a_row and step == last - 1:
                rows = num_rows(batch)
                saved = slice_batch(batch, rows - 1, rows)
                yield slice_batch(batch, 0, rows - 1)
            else:
                yield batch if saved is None else saved


def _check_at_least(least: int, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < least:
            raise ParamError(f"{name} must be at least {least}, got {value}.")


def _joined(parts: Sequence[Batch]) -> Batch:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
