"""``make_spark_converter`` of Petastorm, which notebooks on Databricks call: a DataFrame as a torch DataLoader.

The *driver* writes the DataFrame as Parquet. The converter is pickled to the processes that train, and makes its loader
there. pyspark is imported inside the functions of the driver, and torch when a loader is made.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.checks import check_counts
from sparkdl.closing import Closing
from sparkdl.data.blend.row_stream import RowStream
from sparkdl.data.feed.feed import ParquetFeed
from sparkdl.data.feed.planned_feed import Batch, join_batches, num_rows, slice_batch
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.spark.columns import check_frame, is_vector, quote
from sparkdl.data.spark.materialization import ROW_GROUP_BYTES, obtain_dataset
from sparkdl.data.store.housekeeping import remove_unless_used
from sparkdl.data.store.store import Store
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

    from sparkdl.data.dataset.dataset import ParquetDataset
    from sparkdl.data.files.lease import Lease

PARENT_CACHE_DIR_URL_CONF = "petastorm.spark.converter.parentCacheDirUrl"
"""Petastorm's Spark setting for the folder that converters write to; it applies here, too."""


def make_spark_converter(
    df: DataFrame,
    parent_cache_dir_url: str | os.PathLike[str] | None = None,
    parquet_row_group_size_bytes: int = ROW_GROUP_BYTES,
    dtype: str | None = "float32",
) -> SparkDatasetConverter:
    """Write a DataFrame as Parquet, for training functions to read (*driver*).

    Args:
        df: the DataFrame; all of its columns are written, so the feed has to support their types.
        parent_cache_dir_url: the Store to write to; by default the Spark setting
            ``petastorm.spark.converter.parentCacheDirUrl``, or else :meth:`Store.default`. Executors have to reach it
            under the same URL.
        parquet_row_group_size_bytes: size at which Spark begins a new row group.
        dtype: type to which floating-point columns, arrays of them and vectors are cast, ``float32`` or ``float64``;
            None for no cast.

    Returns:
        The converter. Its files are kept until :meth:`SparkDatasetConverter.delete`, the end of a ``with`` block, or
        the end of this process, even if other processes clean up the Store; converters of the same DataFrame object
        share them. A DataFrame that only reads Parquet files is not copied, and its files are never removed.

    Raises:
        ParamError: if ``dtype`` is another type, or ``parquet_row_group_size_bytes`` is below 1.
        DataError: if ``df`` is no DataFrame of Spark, or a stream; if a column cannot be fed, or there are no rows.
        StoreError: if the Store cannot be written.
    """
    check_frame(df, "make_spark_converter")
    if dtype not in ("float32", "float64", None):
        raise ParamError(f"dtype must be 'float32', 'float64' or None, got {dtype!r}.")
    check_counts(least=1, parquet_row_group_size_bytes=parquet_row_group_size_bytes)
    if parent_cache_dir_url is None:
        parent_cache_dir_url = df.sparkSession.conf.get(PARENT_CACHE_DIR_URL_CONF, None)
    store = Store.default() if parent_cache_dir_url is None else Store(parent_cache_dir_url)
    obtained = obtain_dataset(
        df if dtype is None else _with_precision(df, dtype),
        df.columns,
        store,
        "make_spark_converter",
        vector_dtype=dtype or "float64",
        row_group_bytes=parquet_row_group_size_bytes,
        origin=df,
    )
    return SparkDatasetConverter(obtained.dataset, is_written=obtained.is_written, use=obtained.use)


@dataclass(frozen=True)
class SparkDatasetConverter(AbstractContextManager["SparkDatasetConverter"]):
    """A materialized DataFrame that makes DataLoaders; it can be pickled to the ranks.

    Attributes:
        dataset: the Parquet files, which :class:`sparkdl.data.ParquetFeed` reads as well.
        is_written: whether the files are a copy in a Store; only such files are deleted.
        use: use that protects the files from removal by other processes; only on the driver.
    """

    dataset: ParquetDataset
    is_written: bool = False
    use: Lease | None = dataclasses.field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return SparkDatasetConverter, (self.dataset, self.is_written)

    def __len__(self) -> int:
        return self.dataset.num_rows

    @property
    def dataset_size(self) -> int:
        """Rows of the DataFrame."""
        return self.dataset.num_rows

    @property
    def cache_dir_url(self) -> str:
        """URL of the folder that holds the files."""
        return open_location(self.dataset.url).spark_url

    @property
    def file_urls(self) -> list[str]:
        """URLs of the Parquet files."""
        paths = dict.fromkeys(row_group.path for row_group in self.dataset.row_groups)
        return [f"{self.cache_dir_url}/{path}" for path in paths]

    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        *,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        shuffle_row_groups: bool = True,
        seed: int | None = None,
        schema_fields: Sequence[str] | None = None,
        predicate: Any = None,
        transform_spec: Any = None,
        cache_type: str | None = None,
        cache_location: str | None = None,
        cache_size_limit: int | None = None,
        **others: Any,
    ) -> ConverterLoader:
        """Return a loader of dict batches of tensors, to be used in a ``with`` block (*rank*).

        Each rank makes its own loader, with ``cur_shard=hvd.rank(), shard_count=hvd.size()``. All ranks take the same
        number of steps, and each row is read exactly once per epoch. No batch is empty if ``batch_size`` is above 1.
        Without ``num_epochs`` every batch is full, and a batch can contain rows of two epochs.

        Args:
            batch_size: rows per batch.
            num_epochs: passes over the rows; None for no end.
            workers_count: reader threads, by default 2.
            shuffling_queue_capacity: number of rows in the shuffle buffer; by default as for
                :class:`~sparkdl.data.ParquetFeed`; with 0 the rows of a row group keep their order.
            cur_shard: this rank.
            shard_count: number of ranks.
            shuffle_row_groups: whether to shuffle the row groups in every epoch; if not, rows are not shuffled either.
            seed: seed of the order, 0 by default; the same on every rank.
            schema_fields: names of the columns to read, by default all; a ``transform_spec`` gets these columns.
            predicate: a predicate of Petastorm or a :class:`~sparkdl.data.RowFilter`.
            transform_spec: a ``TransformSpec``; its function takes a pandas DataFrame.
            cache_type: ``memory`` or ``local-disk`` to keep decoded rows after the first epoch; None or ``null``
                for no cache.
            cache_location: folder of a cache on disk.
            cache_size_limit: maximum size of the cache in bytes.
            others: other arguments of Petastorm, which are refused because they have no meaning here.

        Returns:
            A context manager and iterable; ``len`` returns the number of batches if ``num_epochs`` is set.

        Raises:
            ParamError: if an argument is out of range, unknown, or cannot be combined with another.
            DataError: if a column does not exist.
            ShardingError: if there are fewer rows than ranks.
        """
        if others:
            raise ParamError(
                f"make_torch_dataloader takes no {next(iter(others))!r} here. Readers are threads that read ahead "
                "within a bound of bytes. For further settings make a sparkdl.data.ParquetFeed of converter.dataset."
            )
        if (cur_shard is None) != (shard_count is None):
            raise ParamError(
                f"cur_shard is {cur_shard} and shard_count {shard_count}; give both, or neither to read all rows."
            )
        rank, world_size = cur_shard or 0, 1 if shard_count is None else shard_count
        if not 0 <= rank < world_size:
            raise ParamError(f"cur_shard must be in [0, {world_size}), which is shard_count; got {rank}.")
        counts = {
            "workers_count": workers_count,
            "num_epochs": num_epochs,
            "cache_size_limit": cache_size_limit,
        }
        check_counts(least=1, **{name: count for name, count in counts.items() if count is not None})
        check_counts(least=0, shuffling_queue_capacity=shuffling_queue_capacity or 0)
        if cache_type not in _CACHES:
            raise ParamError(f"cache_type must be 'memory', 'local-disk' or None, got {cache_type!r}.")
        cache = _CACHES[cache_type]
        if cache == "disk" and cache_location is not None and not Path(cache_location).is_dir():
            raise ParamError(f"cache_location must be a folder that exists, got {cache_location!r}.")
        if shuffling_queue_capacity and not shuffle_row_groups:
            raise ParamError(
                f"shuffling_queue_capacity is {shuffling_queue_capacity}, which needs shuffle_row_groups=True. Set "
                "that, or set shuffling_queue_capacity=0."
            )
        limit: dict[str, Any] = {} if cache_size_limit is None else {"cache_limit_bytes": cache_size_limit}
        feed = ParquetFeed(
            self.dataset,
            columns=schema_fields,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            shuffle=shuffle_row_groups,
            seed=seed or 0,
            num_threads=workers_count or 2,
            shuffle_buffer_rows=1 if shuffling_queue_capacity == 0 else shuffling_queue_capacity,
            row_filter=predicate,
            transform=transform_spec,
            cache=cache,
            cache_folder=cache_location,
            **limit,
        )
        return ConverterLoader(feed, rank, batch_size, num_epochs)

    def delete(self) -> None:
        """Remove the files that were written (*driver*); calling it again does nothing.

        Files that other processes are reading are kept, and so are Parquet files that were not copied.

        Raises:
            StoreError: if they cannot be removed.
        """
        if self.use is not None:
            self.use.close()
        if self.is_written:
            remove_unless_used(self.dataset.url)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.delete()


_CACHES: dict[str | None, Literal["memory", "disk"] | None] = {
    None: None,
    "null": None,
    "memory": "memory",
    "local-disk": "disk",
    "disk": "disk",
}


class ConverterLoader(Closing):
    """Batches of one rank; a context manager that closes its readers.

    Args:
        feed: feed of the rank, which the loader closes.
        rank: the rank.
        batch_size: rows per batch.
        num_epochs: passes over the rows; None for no end.
    """

    def __init__(self, feed: ParquetFeed, rank: int, batch_size: int, num_epochs: int | None) -> None:
        self._feed, self._rank, self._batch_size, self._num_epochs = feed, rank, batch_size, num_epochs
        self._stream = RowStream("converter", feed)
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
        # Here, because the driver makes converters without torch.
        from sparkdl.loaders.feed_dataset import as_tensor

        for batch in self._batches():
            yield {name: as_tensor(array) for name, array in batch.items()}

    def close(self) -> None:
        """Stop the reader threads; further calls do nothing."""
        self._stream.close()
        self._feed.close()

    def _batches(self) -> Iterator[Batch]:
        if self._num_epochs is None:
            while True:
                yield join_batches(self._stream.take(self._batch_size))
        begun = self._epochs_begun
        for epoch in range(begun, begun + self._num_epochs):
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


def _with_precision(df: DataFrame, dtype: str) -> DataFrame:
    from pyspark.sql import functions as F

    wanted = "float" if dtype == "float32" else "double"
    columns = []
    for field in df.schema.fields:
        column, cast = F.col(quote(field.name)), _cast_type(field.dataType, wanted)
        columns.append(column if cast is None else column.cast(cast).alias(field.name))
    return df.select(*columns)


def _cast_type(data_type: DataType, wanted: str) -> str | None:
    """Return the type to cast to; None for a type without floating-point numbers of the other precision."""
    from pyspark.sql import types as T

    if isinstance(data_type, T.ArrayType) and not is_vector(data_type):
        inner = _cast_type(data_type.elementType, wanted)
        return None if inner is None else f"array<{inner}>"
    is_floating = isinstance(data_type, (T.FloatType, T.DoubleType))
    return wanted if is_floating and data_type.simpleString() != wanted else None
