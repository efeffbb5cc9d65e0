"""Writes a DataFrame as a Parquet dataset in a Store. Runs on the *driver*; the executors write the files.

Works on classic Spark and on Spark Connect: only the DataFrame API is used, and pyspark is imported inside
the functions, because ranks do not have it. A DataFrame whose rows are already there is not written again.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import pyarrow as pa

from sparkdl.checks import check_counts
from sparkdl.data.dataset.footers import list_parquet_files, scan_dataset
from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.data.spark.columns import (
    array_depth,
    check_case,
    check_frame,
    check_types,
    is_vector,
    quote,
    with_bytes,
)
from sparkdl.data.spark.in_place import open_in_place
from sparkdl.data.spark.input_files import check_tables
from sparkdl.data.spark.reading import reading_job
from sparkdl.data.spark.rows_key import shared_key
from sparkdl.data.spark.validate import check_census, common_length, no_rows_error
from sparkdl.data.spark.writing import (
    REPORT_SCHEMA,
    ColumnCensus,
    WrittenFile,
    add_up,
    merge_small_files,
    write_partition,
)
from sparkdl.data.store.housekeeping import remove_unless_used
from sparkdl.data.store.store import as_store, reopen_dataset, use_if_removable
from sparkdl.errors import (
    DataError,
    EmptyDatasetError,
    ParamError,
    StoreError,
    StoreFullError,
    count_of,
    list_names,
)
from sparkdl.spark.jobs import jobs_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

    from sparkdl.data.dataset.dataset import ParquetDataset
    from sparkdl.data.files.lease import Lease
    from sparkdl.data.store.store import StagedDataset, Store

logger = logging.getLogger(__name__)

ROW_GROUP_BYTES = 16 << 20
"""Bytes of a row group in memory: smaller ones shuffle better, larger ones read faster; a rank holds a few at once."""

_NAME = "fit"
_WAIT_S = 3600.0
"""Seconds that a fit waits for another thread that writes the same rows, before it writes rows of its own."""


@dataclass(frozen=True)
class _CopyRequest:
    origin: DataFrame
    df: DataFrame
    fields: Sequence[StructField]
    store: Store
    vector_dtype: str
    row_group_bytes: int
    allow_ragged: bool
    nullable: frozenset[str]
    on_write: Callable[[], None] | None
    in_tasks: Callable[[int], None] | None

    @property
    def key(self) -> str | None:
        options = {
            "columns": [[field.name, field.dataType.json()] for field in self.fields],
            "store": self.store.url,
            "vector_dtype": self.vector_dtype,
            "row_group_bytes": self.row_group_bytes,
            "allow_ragged": self.allow_ragged,
            "nullable": sorted(self.nullable),
        }
        return shared_key(self.origin, options)


@dataclass(frozen=True)
class Obtained:
    """A dataset, and the use that protects it from removal.

    Attributes:
        dataset: dataset of the rows.
        use: use that protects the folder until the receiver ends it; None for files that sparkdl did not write, which
            it never removes.
        is_written: whether the rows were copied to the Store, now or earlier.
        is_shared: whether another fit on the same DataFrame object gets the same copy.
    """

    dataset: ParquetDataset
    use: Lease | None
    is_written: bool = True
    is_shared: bool = True


def materialize(
    df: DataFrame,
    columns: Sequence[str],
    store: Store | str | os.PathLike[str],
    *,
    vector_dtype: str = "float64",
    row_group_bytes: int = ROW_GROUP_BYTES,
    allow_ragged: bool = True,
    nullable: Collection[str] = (),
) -> ParquetDataset:
    """Return columns of a DataFrame as a Parquet dataset, after checking that ranks can be fed with them.

    The same rows are written only once: another call with the same DataFrame object, later or while they are being
    written, returns the same dataset, unless settings or files changed (see :mod:`sparkdl.data.spark.rows_key`). A
    DataFrame that is a plain read of Parquet files is not written at all. Written rows become visible when all checks
    have passed; otherwise they are removed.

    Args:
        df: the DataFrame, of classic Spark or Spark Connect.
        columns: names of its columns: booleans, numbers, strings, binary, decimals, dates, timestamps, images of
            Spark's ``image`` source or of Hugging Face's files, vectors, and arrays and nested arrays of them, ragged
            or not.
        store: Store to write to, or its path or URL; executors must reach it under the same URL.
        vector_dtype: dtype of the elements of vector columns, ``float64`` or ``float32``.
        row_group_bytes: decoded bytes at which a row group ends, whatever the number of partitions.
        allow_ragged: whether arrays of a column may differ in length, or be empty.
        nullable: names of columns that may have nulls, which a feed replaces: ``ParquetFeed(..., nulls=...)``.

    Returns:
        The dataset. It stays for the Store's ``keep_for`` after its last use; :func:`use_materialized` keeps it
        until a block ends.

    Raises:
        DataError: if ``df`` is not a DataFrame of Spark, or a stream; if a column is missing or cannot be fed, or has
            nulls; if there are no rows; if Spark cannot read a file, which the message names.
        StoreError: if the Store cannot be written, or the executors write to another place than the driver
            reads.
        LaunchError: if the executors' Python lacks sparkdl or one of its libraries.
        ExecutorsLostError: if Python workers or executors were lost, more often than Spark tries a task.
        SparkJobError: if the Spark job failed for another reason.
    """
    obtained = obtain_dataset(
        df,
        columns,
        store,
        "materialize",
        vector_dtype=vector_dtype,
        row_group_bytes=row_group_bytes,
        allow_ragged=allow_ragged,
        nullable=nullable,
    )
    if obtained.use is not None:
        obtained.use.close()
    return obtained.dataset


@contextmanager
def use_materialized(
    df: DataFrame,
    columns: Sequence[str],
    store: Store | str | os.PathLike[str],
    *,
    vector_dtype: str = "float64",
    allow_ragged: bool = True,
    nullable: Collection[str] = (),
    origin: DataFrame | None = None,
    on_write: Callable[[], None] | None = None,
    in_tasks: Callable[[int], None] | None = None,
) -> Iterator[ParquetDataset]:
    """Yield the dataset that :func:`materialize` returns, protected from cleanup until the block ends.

    Rows that no other fit can share, such as those of a random sample, are removed at the end of the block, and so are
    the rows in a Store that keeps nothing (``keep_for=timedelta(0)``).

    ``origin`` is the user's DataFrame, if ``df`` was made of it by casts alone: fits on that object share the rows.
    ``on_write`` is called before rows are written. ``in_tasks`` is called on the executors, in each task that writes
    rows, with the number of its partition. Rows that are already in the Store, or are read in place, are not written.
    """
    obtained = obtain_dataset(
        df,
        columns,
        store,
        "use_materialized",
        vector_dtype=vector_dtype,
        allow_ragged=allow_ragged,
        nullable=nullable,
        origin=origin,
        on_write=on_write,
        in_tasks=in_tasks,
    )
    try:
        yield obtained.dataset
    finally:
        if obtained.use is not None:
            obtained.use.close()
        if obtained.is_written and not (obtained.is_shared and as_store(store).keep_for):
            url = obtained.dataset.url
            try:
                remove_unless_used(url)
            except (
                Exception
            ) as error:  # only logged, so that neither a trained model nor an earlier error is lost
                logger.warning("The rows stay in %s; remove that folder yourself. %s", url, error)


def obtain_dataset(
    df: DataFrame,
    columns: Sequence[str],
    store: Store | str | os.PathLike[str],
    taker: str,
    *,
    vector_dtype: str = "float64",
    row_group_bytes: int = ROW_GROUP_BYTES,
    allow_ragged: bool = True,
    nullable: Collection[str] = (),
    origin: DataFrame | None = None,
    on_write: Callable[[], None] | None = None,
    in_tasks: Callable[[int], None] | None = None,
) -> Obtained:
    """Do what :func:`materialize` does, and return the dataset with a use that the caller closes.

    ``taker`` is the function that takes the DataFrame, as its caller spells it.
    """
    check_frame(df, taker)
    if isinstance(columns, str):
        raise ParamError(f"columns must be a list of names, got the text {columns!r}. Write [{columns!r}].")
    fields = check_types(df.schema, columns)
    check_case(df, columns)
    request = _CopyRequest(
        df if origin is None else origin,
        df,
        fields,
        as_store(store),
        vector_dtype,
        row_group_bytes,
        allow_ragged,
        frozenset(nullable),
        on_write,
        in_tasks,
    )
    if vector_dtype not in {"float32", "float64"}:
        raise DataError(f"vector_dtype must be 'float32' or 'float64', got {vector_dtype!r}.")
    check_counts(least=1, row_group_bytes=row_group_bytes)
    with jobs_of(taker, unless_named=True):
        check_tables(df)
        dataset = open_in_place(df, fields, allow_ragged=allow_ragged, nullable=nullable)
        if dataset is not None:
            return Obtained(dataset, use_if_removable(dataset.url), is_written=False)
        request.store.check_writable()
        try:
            request.store.cleanup()
        except StoreError as error:
            logger.warning("%s", error)
        key = request.key
        if key is not None:
            obtained = _share(request, key)
            if obtained is not None:
                return obtained
        with request.store.stage_dataset(_NAME) as staged:
            dataset = staged.commit(_write(request, staged))
            return Obtained(dataset, staged.hand_over_use(), is_shared=False)


def describe_first_rows(
    df: DataFrame,
    columns: Sequence[str],
    folder: str | os.PathLike[str],
    *,
    num_rows: int,
    vector_dtype: str,
    allow_ragged: bool,
    nullable: Collection[str] = (),
) -> ParquetDataset:
    """Return the first rows without nulls as a dataset in a local folder of the driver, which needs no Store.

    Args:
        df: the DataFrame, of classic Spark or Spark Connect.
        columns: names of its columns, as for :func:`materialize`.
        folder: existing local folder.
        num_rows: number of rows.
        vector_dtype: dtype of the elements of vector columns.
        allow_ragged: whether arrays of a column may differ in length, or be empty.
        nullable: names of columns that may have nulls in these rows.

    Raises:
        DataError: as :func:`materialize`.
    """
    from pyspark.sql.types import StructType

    fields = check_types(df.schema, columns)
    check_case(df, columns)
    names = [field.name for field in fields]
    spark = df.sparkSession
    chosen = df.select(*map(quote, names))
    if complete := [quote(name) for name in names if name not in nullable]:
        # Not by dropna, which takes NaN for null.
        chosen = chosen.where(f"NOT array_contains(array({' IS NULL, '.join(complete)} IS NULL), true)")
    with reading_job(spark, "reading example rows", columns=names):
        # Spark reads one partition after the other until it has the rows.
        rows = spark.createDataFrame(chosen.limit(num_rows).collect(), StructType(fields))
        structs = _structs(rows, fields, vector_dtype).coalesce(1)
        collected = structs.mapInArrow(_as_stream, "stream binary").collect()
    batches = [batch for (stream,) in collected for batch in pa.ipc.open_stream(bytes(stream))]
    url = absolute_url(folder)
    (report,) = [
        WrittenFile.from_json(made.column(0)[0].as_py())
        for made in write_partition(iter(batches), url, names, ROW_GROUP_BYTES, nullable=nullable)
    ] or [WrittenFile()]
    if not report.num_rows:
        needed = [name for name in names if name not in nullable]
        raise EmptyDatasetError(
            f"The DataFrame has no row without a null in {list_names(map(repr, needed))}."
            if needed
            else "The DataFrame has no rows."
        )
    check_census(report.columns, report.num_rows, nullable)
    return scan_dataset(url, names, _shapes(fields, report.columns, allow_ragged=allow_ragged))


def _as_stream(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch as one value: the bytes of an Arrow stream."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_pydict({"stream": [sink.getvalue().to_pybytes()]})


class _SharedRows:
    """The written rows of a DataFrame object under one key, and the lock of the thread that writes them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.url = ""


_shared_rows: WeakKeyDictionary[DataFrame, dict[str, _SharedRows]] = WeakKeyDictionary()
_registering = threading.Lock()


def _share(request: _CopyRequest, key: str) -> Obtained | None:
    """Return the dataset of that key, which the first thread writes; None if files or settings change meanwhile."""
    with _registering:
        rows = _shared_rows.setdefault(request.origin, {}).setdefault(key, _SharedRows())
    if not rows.lock.acquire(blocking=False):
        logger.info("Another thread is writing the same rows to %s; waiting for it.", request.store.url)
        if not rows.lock.acquire(timeout=_WAIT_S):
            return None
    try:
        if rows.url and (existing := reopen_dataset(rows.url)) is not None:
            return Obtained(*existing)
        with request.store.stage_dataset(_NAME) as staged:
            dataset = _write(request, staged)
            if request.key != key:
                logger.info("Files or settings changed while the rows were read; they are not shared.")
                return None
            dataset = staged.commit(dataset)
            rows.url = dataset.url
            return Obtained(dataset, staged.hand_over_use())
    finally:
        rows.lock.release()


def _write(request: _CopyRequest, staged: StagedDataset) -> ParquetDataset:
    """Write the rows, check them and describe the files in the folder."""
    df, store = request.df, request.store
    if request.on_write is not None:
        request.on_write()
    names = [field.name for field in request.fields]
    rows = _structs(df, request.fields, request.vector_dtype)
    task = partial(
        write_partition,
        url=staged.url,
        names=names,
        row_group_bytes=request.row_group_bytes,
        begin=request.in_tasks,
        nullable=request.nullable,
    )
    # Other tasks of a failed job would continue to write, and create the folder again that is removed now.
    with reading_job(df.sparkSession, "writing rows", waits_for_tasks=True):
        reports = [WrittenFile.from_json(row[0]) for row in rows.mapInArrow(task, REPORT_SCHEMA).collect()]
    files = sorted(reports, key=lambda file: file.order)
    _check_failures(store, files)
    num_rows = sum(file.num_rows for file in files)
    if not num_rows:
        raise no_rows_error()
    _keep_only(store, staged, files)
    census: dict[str, ColumnCensus] = {}
    for file in files:
        add_up(census, file.columns)
    # Before the shapes, because a column of nulls has no lengths.
    check_census(census, num_rows, request.nullable)
    shapes = _shapes(request.fields, census, allow_ragged=request.allow_ragged)
    files = merge_small_files(df.sparkSession, staged.url, files, request.row_group_bytes)
    _check_failures(store, files)
    described = scan_dataset(staged.url, names, shapes, [file.path for file in files])
    return replace(described, versions={})  # as for a fit that opens the dataset in the Store


def _shapes(
    fields: Sequence[StructField], census: dict[str, ColumnCensus], *, allow_ragged: bool
) -> dict[str, tuple[int | None, ...]]:
    shapes = {}
    for field in fields:
        depth = array_depth(field.dataType)
        seen = census[field.name].lengths
        levels = [*seen, *[(None, None)] * (depth - len(seen))]  # levels inside of empty arrays were not seen
        if depth:
            shapes[field.name] = tuple(
                common_length(field.name, least, greatest, allow_ragged=allow_ragged)
                for least, greatest in levels
            )
    return shapes


def _structs(df: DataFrame, fields: Sequence[StructField], vector_dtype: str) -> DataFrame:
    """Return the columns as one column of structs, with vectors as arrays and encoded images as their bytes.

    mapInArrow calls the JVM several times for each column, and on classic Spark it fails on dots in column names.
    """
    parts = ", ".join(f"{quote(field.name)} as c{index}" for index, field in enumerate(fields))
    return _with_arrays(with_bytes(df, fields), fields, vector_dtype).selectExpr(f"struct({parts}) as row")


def _with_arrays(df: DataFrame, fields: Sequence[StructField], vector_dtype: str) -> DataFrame:
    """Return the DataFrame with the vectors of those columns converted to arrays."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    arrays = {}
    for field in fields:
        if is_vector(field.dataType):
            column = F.col(quote(field.name))
            # With a condition, because vector_to_array fails on a null, which is to be counted and reported instead.
            arrays[field.name] = F.when(column.isNotNull(), vector_to_array(column, vector_dtype))
    return df.withColumns(arrays) if arrays else df


def _check_failures(store: Store, files: Sequence[WrittenFile]) -> None:
    for file in files:
        if file.failure:
            kind = StoreFullError if file.is_store_full else StoreError
            raise kind(f"The Store {store.url} cannot be written: {file.failure}")


def _keep_only(store: Store, staged: StagedDataset, files: Sequence[WrittenFile]) -> None:
    """Remove the files of task attempts that Spark gave up, after checking that all files of the others are there."""
    location = open_location(staged.url)
    present = set(list_parquet_files(location))
    wanted = {file.path for file in files if file.path}
    if wanted - present:
        raise StoreError(
            f"Spark wrote {count_of(len(wanted), 'file')} to {store.url}, but the driver finds "
            f"{len(wanted & present)} of them there: the executors have other disks. Choose a Store "
            "that all machines share, such as a mounted or an object store."
        )
    if present - wanted:
        location.filesystem.rm([f"{location.path}/{path}" for path in sorted(present - wanted)])
