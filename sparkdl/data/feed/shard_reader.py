"""Reads one rank's shard of one epoch with Petastorm's ventilator: a thread that requests row groups ahead.

Of Petastorm 0.12.1 the feed takes:

- ``ConcurrentVentilator``, which hands the planned row groups to a pool, and waits while too many are on their way,
- its division of work: a ventilator requests, a pool of reader threads decodes, and the reader takes the results.

The plan (which row groups, which of their rows, in which order), the pool with one order and a bound of bytes, and the
decoding with Arrow are sparkdl's. The ventilator is loaded from Petastorm's installed file, without the package around
it: that would import pandas, and needs names which pyarrow and NumPy have removed. Only Petastorm's own datasets,
predicates and transforms need the package; :mod:`sparkdl.data.petastorm` reads them.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.data.dataset.blocks import copy_of, own_objects, slice_rows, take_rows
from sparkdl.data.dataset.dataset import folder_values
from sparkdl.data.dataset.row_group_file import RowGroupFile
from sparkdl.data.feed.pool import OrderedThreadPool, results_in_order
from sparkdl.data.files import threads
from sparkdl.data.files.changed_files import WatchedFiles
from sparkdl.data.files.filesystems import Location, open_location
from sparkdl.errors import DataError, FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from sparkdl.data.dataset.blocks import Block, BlockLayout
    from sparkdl.data.dataset.dataset import ParquetDataset, Preparation
    from sparkdl.data.dataset.row_choice import RowChoice
    from sparkdl.data.feed.cache import BlockCache, FooterCache
    from sparkdl.data.feed.epoch_plan import RowGroupPart, Rows

SUPPORTED_RELEASE = "0.12"
"""The supported release of Petastorm. 0.13.1 pins setuptools below what torch needs, and its thread pool loses row
groups."""

_MAX_ROW_GROUPS_HELD = 64
# Petastorm's 0.01 s would limit the feed to a few hundred row groups per second.
_VENTILATION_INTERVAL_S = 0.001


def find_petastorm() -> Path:
    """Return the folder of the installed Petastorm, without importing it.

    Raises:
        DataError: if it is not installed, or has an unsupported version.
    """
    spec = PathFinder.find_spec("petastorm")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("Reading Parquet needs Petastorm: pip install petastorm==0.12.1")
    release = version("petastorm")
    if not release.startswith(SUPPORTED_RELEASE + "."):
        raise DataError(
            f"petastorm {release} is installed, sparkdl needs 0.12.1: pip install petastorm==0.12.1"
        )
    return Path(spec.submodule_search_locations[0])


@cache
def load_ventilator() -> Any:
    """Return Petastorm's class ``ConcurrentVentilator``.

    Raises:
        DataError: if Petastorm is not installed, or has an unsupported version.
    """
    path = find_petastorm() / "workers_pool" / "ventilator.py"
    spec = importlib.util.spec_from_file_location("sparkdl.data.feed.petastorm_ventilator", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ConcurrentVentilator


class ShardReader:
    """Iterator over the blocks of a shard in the order of its plan, one for every row group.

    Args:
        dataset: dataset to read.
        layout: columns to read and their layout in blocks.
        shard: rows to read of each row group, numbered among those that pass the filter.
        row_counts: number of rows of every row group that pass the filter.
        num_threads: number of reader threads.
        read_ahead_bytes: upper bound of the bytes of decoded row groups, unless a single one takes more.
        timeout_s: seconds to wait for one row group.
        row_choice: selects the rows to read; by default all.
        footers: cache of parsed footers.
        cache: cache of the blocks of whole row groups; None for no cache.
        copies_cached: whether blocks from the cache are copied, so that the caller may write to them.
        preparation: computes the columns of the layout from those in the files; None if they are the same.
        files: detects files that change between this reader and others that share this object; None for a new one.
    """

    def __init__(
        self,
        dataset: ParquetDataset,
        layout: BlockLayout,
        shard: Sequence[RowGroupPart],
        *,
        row_counts: Sequence[int],
        num_threads: int,
        read_ahead_bytes: int,
        timeout_s: float,
        footers: FooterCache,
        row_choice: RowChoice | None = None,
        cache: BlockCache | None = None,
        copies_cached: bool = True,
        preparation: Preparation | None = None,
        files: WatchedFiles | None = None,
    ) -> None:
        self._dataset, self._layout, self._row_counts = dataset, layout, row_counts
        self._row_choice, self._preparation, self._footers = row_choice, preparation, footers
        self._cache, self._copies_cached = cache, copies_cached
        self._location = open_location(dataset.url)
        self._files = WatchedFiles(self._location.open_file) if files is None else files
        self._names = _names_of(layout, row_choice, preparation)
        # Twice: the columns as Arrow decodes them, and the block that is made from them.
        row_bytes = 2 * layout.row_bytes + _bytes_beside(dataset, layout, self._names)
        self._pool = OrderedThreadPool(
            self._read,
            num_threads=num_threads,
            timeout_s=timeout_s,
            budget_bytes=read_ahead_bytes,
            bytes_of=lambda row_group: row_bytes * dataset.row_groups[row_group].num_rows,
            name_of=partial(_name_of, dataset, self._location),
        )
        ventilator = load_ventilator()(
            self._pool.ventilate,
            [{"row_group": row_group, "rows": rows} for row_group, rows in shard],
            iterations=1,
            max_ventilation_queue_size=_MAX_ROW_GROUPS_HELD,
            ventilation_interval=_VENTILATION_INTERVAL_S,
        )
        self._pool.start(ventilator)

    def __iter__(self) -> Iterator[Block]:
        """Return this reader, which is an iterator over the blocks."""
        return self

    def __next__(self) -> Block:
        """Return the next block.

        Raises:
            DataError: if it cannot be read, or the reader was closed.
        """
        block = self._pool.get_result()
        if block is None:
            raise StopIteration
        return block

    def close(self) -> None:
        """Stop the reader threads; calling it again does nothing."""
        self._pool.stop()

    def _read(self, row_group: int, rows: Rows) -> Block:
        """Read some rows of a row group as one block, on a reader thread.

        Args:
            row_group: number of the row group in the dataset.
            rows: rows to read, numbered among those that pass the filter.

        Raises:
            DataError: if the file cannot be read or differs from what was planned; see
                :meth:`sparkdl.data.dataset.row_group_file.RowGroupFile.error`.
        """
        file = _row_group_file(self._dataset, self._location, row_group, self._files, self._footers)

        def read_table() -> pa.Table:
            table = file.read(self._names)
            threads.ARROW_RELEASE.add(table.nbytes)
            expected = self._dataset.row_groups[row_group].num_rows
            if table.num_rows != expected:
                raise FileChangedError(
                    f"it has {table.num_rows} rows now, but had {expected} when the dataset was described"
                )
            return table

        try:
            return self._block(row_group, rows, read_table)
        except Exception as error:
            raise file.error(error, self._names) from error

    def _block(self, row_group: int, rows: Rows, read_table: Callable[[], pa.Table]) -> Block:
        if self._cache is not None:
            whole = self._cache.get(row_group, lambda: self._chosen(row_group, read_table()))
            selected = _select(whole, rows)
            if self._copies_cached:
                return copy_of(selected)
            # Shuffling copies the rows, but not the objects that they refer to.
            return [own_objects(array) if array.dtype.hasobject else array for array in selected]
        if self._row_choice is not None:
            return _select(self._chosen(row_group, read_table()), rows)
        if isinstance(rows, range):  # sliced before packing, which copies if there are many columns
            return self._pack(read_table().slice(rows.start, len(rows)))
        return take_rows(self._pack(read_table()), rows)

    def _chosen(self, row_group: int, table: pa.Table) -> Block:
        """Return all rows that pass the filter as a block."""
        if self._row_choice is None:
            return self._pack(table)
        chosen, expected = self._row_choice.rows_kept(table, row_group), self._row_counts[row_group]
        if len(chosen) != expected:
            raise DataError(
                f"{len(chosen)} rows pass the row filter now, but {expected} did when they were counted; a filter must "
                "give the same answer for the same rows every time"
            )
        if len(chosen) == table.num_rows:
            return self._pack(table)
        if self._preparation is not None:  # which costs more than leaving the rows out first
            return self._pack(table.take(chosen))
        return take_rows(self._pack(table), chosen)

    def _pack(self, table: pa.Table) -> Block:
        if self._preparation is not None:
            table = self._preparation.apply(table, [column.name for column in self._layout.columns])
        return self._layout.pack(table)


def chosen_rows_counter(
    dataset: ParquetDataset,
    row_choice: RowChoice,
    *,
    footers: FooterCache,
    files: WatchedFiles,
    num_threads: int,
    timeout_s: float,
) -> Callable[[Iterable[int]], Iterator[int]]:
    """Return a function that counts the rows of row groups that pass a filter, reading only the filter's columns.

    Args:
        dataset: dataset to read.
        row_choice: filter whose passing rows are counted.
        footers: cache of parsed footers.
        files: detects files that change between counting and the readers that share this object.
        num_threads: number of threads that read row groups.
        timeout_s: seconds to wait for one row group.
    """
    location = open_location(dataset.url)

    def count(row_group: int) -> int:
        file = _row_group_file(dataset, location, row_group, files, footers)
        try:
            return len(row_choice.rows_kept(file.read(row_choice.columns), row_group))
        except Exception as error:
            raise file.error(error, row_choice.columns) from error

    return lambda row_groups: results_in_order(
        count,
        row_groups,
        num_threads=num_threads,
        timeout_s=timeout_s,
        name_of=partial(_name_of, dataset, location),
    )


def _name_of(dataset: ParquetDataset, location: Location, row_group: int) -> str:
    group = dataset.row_groups[row_group]
    return f"{location.name_of(f'{location.path}/{group.path}')}, row group {group.index}"


def _row_group_file(
    dataset: ParquetDataset, location: Location, row_group: int, files: WatchedFiles, footers: FooterCache
) -> RowGroupFile:
    group = dataset.row_groups[row_group]
    path = f"{location.path}/{group.path}"
    return RowGroupFile(
        path, files.open, group.index, location.name_of(path), folder_values(group.path), footers.open
    )


def _names_of(
    layout: BlockLayout, row_choice: RowChoice | None, preparation: Preparation | None
) -> list[str]:
    """Return the names of the columns to read from the files."""
    names = (
        [column.name for column in layout.columns] if preparation is None else list(preparation.source_names)
    )
    return list(dict.fromkeys([*names, *(row_choice.columns if row_choice else ())]))


def _bytes_beside(dataset: ParquetDataset, layout: BlockLayout, names: Iterable[str]) -> int:
    """Return the bytes per row of columns read only for a filter or transform, as far as the dataset describes them."""
    beside = set(names) - {column.name for column in layout.columns}
    return sum(column.row_bytes for column in dataset.columns if column.name in beside)


def _select(block: Block, rows: Rows) -> Block:
    return slice_rows(block, rows.start, rows.stop) if isinstance(rows, range) else take_rows(block, rows)
