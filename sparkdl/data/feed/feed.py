"""The feed of one *rank*: its shard of a Parquet dataset as batches of NumPy arrays, epoch after epoch.

The caller chooses columns by name, or gives its own names to one or several columns each.

Reader threads decode row groups and another thread shuffles them, ahead of the training loop and within a limit in
bytes. The result depends on (seed, epoch), the rank and the world size alone, never on threads or timing. The caller
moves the batches to torch and to devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import copy
from typing import TYPE_CHECKING, Any, NoReturn

import numpy.typing as npt

from sparkdl.data.checks import check_counts, check_integer, check_seconds
from sparkdl.data.dataset.blocks import BlockLayout
from sparkdl.data.dataset.dataset import check_transform
from sparkdl.data.dataset.rows import RowFilter, as_row_choice
from sparkdl.data.feed.batches import cut_batches
from sparkdl.data.feed.epoch_reader import EpochReader, ReadingOptions
from sparkdl.data.feed.row_stream import no_map_of_rows
from sparkdl.data.feed.shards import rows_in_step, rows_per_rank, steps_per_epoch
from sparkdl.data.feed.sources import find_dataset
from sparkdl.data.feed.state import EpochSchedule, Identity, from_json, to_json
from sparkdl.data.files.threads import READ_AHEAD_BYTES
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import TracebackType

    from sparkdl.collective import Communicator
    from sparkdl.data.dataset.dataset import Column, ParquetDataset, Preparation
    from sparkdl.data.feed.sources import Source


def names_and_fields(columns: Any, transform: Any) -> tuple[list[str] | None, Any]:
    """The columns that are read, and those that are given as :func:`layout_of` takes them; None for all.

    A folder has to have the former described; a filter's may be of types that only it understands.

    Raises:
        ParamError: if the choice is none, or no choice of names.
    """
    names = _names(columns)
    if transform is None:
        return names, columns
    return (None, columns) if isinstance(columns, Mapping) else (names, transform.selected_fields)


def _names(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    is_collection = isinstance(columns, Collection) and not isinstance(columns, (str, bytes))
    if not is_collection or not len(columns) or not _are_names(columns) or len(set(columns)) != len(columns):
        raise _no_choice(columns)
    if not isinstance(columns, Mapping):
        return list(columns)
    groups = [[field] if isinstance(field, str) else field for field in columns.values()]
    if not all(isinstance(group, Collection) and _are_names(group) for group in groups):
        raise _no_choice(columns)
    return list(dict.fromkeys(name for group in groups for name in group))


def _apply_transform(columns: Sequence[Column], transform: Any) -> Preparation:
    from sparkdl.data.petastorm.transform import prepare_frames  # imports pandas and Petastorm

    return prepare_frames(columns, transform)


def layout_of(dataset: ParquetDataset | Preparation, columns: Any) -> BlockLayout:
    """The layout of the columns that were asked for; all of them when None.

    Raises:
        DataError: if a column does not exist, or cannot be given.
    """
    if columns is None:
        return BlockLayout(dataset.columns)
    if not isinstance(columns, Mapping):
        return BlockLayout([dataset.column(name) for name in columns])
    return BlockLayout(
        {
            name: dataset.column(field)
            if isinstance(field, str)
            else [dataset.column(column) for column in field]
            for name, field in columns.items()
        }
    )


def _are_names(names: Iterable[Any]) -> bool:
    return all(isinstance(name, str) for name in names)


def _no_choice(columns: Any) -> ParamError:
    return ParamError(
        f"A feed needs columns, each named once; got {columns!r}. Give a list of names, or a dict of a name or "
        "a list of names for each name of your own."
    )


SHUFFLE_BUFFER_BYTES = 64 << 20
"""How much memory the rows of the shuffle buffer take at most by default."""

SHUFFLE_BUFFER_ROWS = 1 << 16
"""How many rows the shuffle buffer holds at most by default: more of them leave the processor's cache."""


class ParquetFeed:
    """Batches of one rank's rows.

    Iterating over a feed gives the batches of its current epoch and then moves on to the next one, so that
    ``for epoch in range(n): for batch in feed: ...`` is a training loop; :meth:`set_epoch` chooses the epoch.

    Args:
        source: the same on every rank: a :class:`ParquetDataset`, the URL or path of a folder of Parquet files or
            of a dataset in a Store, or a Store that holds one dataset. A folder that Petastorm's
            ``materialize_dataset`` wrote is decoded by the codecs of its Unischema, as ``make_reader`` does.
        columns: names of the columns to read, by default all; batches hold them in this order. A mapping gives
            names of its own, each for a column or for several scalar columns of one dtype that come as one matrix:
            ``{"features": ["a", "b"], "label": "y"}``. See ``transform`` for what they are with one.
        shapes: of array columns in a folder of plain Parquet by name the length at every level, None where it differs
            from row to row: ``{"tokens": (None,)}``. A column that is not named has in every row the lengths of
            the first one.
        rank: this rank.
        world_size: number of ranks.
        batch_size: rows per batch and rank.
        shuffle: whether to shuffle the row groups in every epoch, and then the rows in a buffer; otherwise
            rows come in the order of the files.
        seed: any integer; the same on every rank.
        num_threads: threads that read row groups, one each at a time. Arrow decodes the columns of a row group in
            its own pool (``pyarrow.set_cpu_count``, by default as many threads as there are cores), which all of
            a process share.
        shuffle_buffer_rows: rows among which the next ones are drawn; by default 65,536, or as many as fit in
            64 MiB.
        read_ahead_bytes: how much memory decoded row groups and shuffled rows take at most that wait to be used,
            beside the shuffle buffer itself and the cache. A single row group is read even if it takes more.
        row_filter: which rows to give: a :class:`sparkdl.data.RowFilter`, what
            :func:`sparkdl.data.dataset.rows.draw_rows` returns, or a predicate of Petastorm. The rows that pass are
            counted when the feed is made, where their number is not known.
        transform: Petastorm's ``TransformSpec``, applied by the reader threads. Names in ``columns`` are then those
            that its function takes, as with Petastorm's ``schema_fields``; what it gives is what its ``edit_fields``,
            ``removed_fields`` and ``selected_fields`` make of them. A mapping is of columns that it gives, and its
            function takes all that there are. The function takes a pandas DataFrame of rows of one row group, or
            with a Unischema a dict of one row, and may not change how many rows there are. What a cache keeps is
            what it made.
        communicator: open over all ranks, so that each counts its part of the row groups; making the feed is then a
            collective operation. Used for a ``row_filter`` alone.
        cache: keeps decoded row groups after they were first read: in ``"memory"``, or on ``"disk"`` as
            files that are removed when the feed is closed. Neither changes the order of the rows. Rows with strings
            or other objects among their columns, such as arrays of varying length, are kept in memory alone.
        cache_limit_bytes: what the cache takes at most; what does not fit is read again, and that is logged once.
        cache_folder: where the cache's files go; by default the system's folder for temporary files.
        read_timeout_s: seconds to wait for one row group before the read is given up, also while rows that pass the
            filter are counted; and, where the source has to be described first, for all of that.

    Attributes:
        dataset: what is read.

    Raises:
        DataError: if a column does not exist.
        ShardingError: if there are fewer rows than ranks.
        ParamError: if a number is out of range.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        shapes: Mapping[str, tuple[int | None, ...]] | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        num_threads: int = 2,
        shuffle_buffer_rows: int | None = None,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        row_filter: Any = None,
        transform: Any = None,
        communicator: Communicator | None = None,
        cache: str | None = None,
        cache_limit_bytes: int = 4 << 30,
        cache_folder: str | None = None,
        read_timeout_s: float = 600.0,
    ) -> None:
        check_counts(
            least=1,
            world_size=world_size,
            batch_size=batch_size,
            num_threads=num_threads,
            shuffle_buffer_rows=1 if shuffle_buffer_rows is None else shuffle_buffer_rows,
            read_ahead_bytes=read_ahead_bytes,
            cache_limit_bytes=cache_limit_bytes,
        )
        check_counts(least=0, rank=rank)
        if rank >= world_size:
            raise ParamError(f"rank must be in [0, {world_size}), got {rank}.")
        check_integer(seed=seed)
        check_seconds(read_timeout_s=read_timeout_s)
        # NumPy's integers are no values for the JSON of a state, and lack what Python's can do.
        rank, world_size, batch_size, seed = int(rank), int(world_size), int(batch_size), int(seed)
        num_threads, read_ahead_bytes = int(num_threads), int(read_ahead_bytes)
        cache_limit_bytes, read_timeout_s = int(cache_limit_bytes), float(read_timeout_s)
        if cache not in (None, "memory", "disk"):
            raise ParamError(f"cache must be 'memory', 'disk' or None, got {cache!r}.")
        chosen = as_row_choice(row_filter)
        check_transform(transform)
        names, fields = names_and_fields(columns, transform)
        self.dataset = find_dataset(source, names, shapes, timeout_s=read_timeout_s)
        if isinstance(chosen, RowFilter):
            chosen = self.dataset.filter_of(chosen)
        preparation = self.dataset.preparation(transform, names, _apply_transform)
        self._layout = layout_of(preparation or self.dataset, fields)
        rows_per_rank(self.dataset.num_rows, world_size)  # raises when a rank would have none
        if shuffle_buffer_rows is None:
            fitting = SHUFFLE_BUFFER_BYTES // max(1, self._layout.row_bytes)
            shuffle_buffer_rows = max(1, min(fitting, SHUFFLE_BUFFER_ROWS))
        buffer_rows = int(shuffle_buffer_rows) if shuffle else 0
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        self._reader = EpochReader(
            self.dataset,
            self._layout,
            row_choice=chosen,
            preparation=preparation,
            options=ReadingOptions(
                num_threads=num_threads,
                read_ahead_bytes=read_ahead_bytes,
                timeout_s=read_timeout_s,
                buffer_rows=buffer_rows,
                cache=cache,
                cache_limit_bytes=cache_limit_bytes,
                cache_folder=cache_folder,
            ),
        )
        self._row_counts = self._reader.count_rows(communicator)
        self._num_rows = sum(self._row_counts)
        rows_per_rank(self._num_rows, world_size)  # likewise once rows are filtered
        self._identity = Identity.of(self.dataset, self._row_counts, seed=seed, shuffle=shuffle)
        self._schedule = EpochSchedule(
            self._row_counts, world_size=world_size, buffer_rows=buffer_rows, seed=seed, shuffle=shuffle
        )
        self._epoch = 0
        self._given = 0

    @property
    def waited_s(self) -> float:
        """Seconds that the caller has waited for batches so far."""
        return self._reader.waited_s

    @property
    def steps_per_epoch(self) -> int:
        """Batches of every whole epoch, the same number on all ranks."""
        return steps_per_epoch(self._num_rows, self._world_size, self._batch_size)

    def __len__(self) -> int:
        """Batches that the next iteration gives: ``steps_per_epoch``, or what is left of an epoch that was resumed."""
        return self.steps_in(self._epoch)

    def steps_in(self, epoch: int) -> int:
        """Return how many batches :meth:`epoch` gives: fewer than ``steps_per_epoch`` where it was resumed."""
        return math.ceil(max(self.rows_in_epoch(epoch)) / self._batch_size)

    def rows_in_epoch(self, epoch: int) -> list[int]:
        """Return how many rows :meth:`epoch` gives each rank: fewer where it was resumed."""
        return self._schedule.slice_of(epoch).rows_to_come()

    def rows_in_step(self, step: int, epoch: int | None = None) -> list[int]:
        """Return how many rows each rank has in a step: ``batch_size`` in all but the last.

        Args:
            step: number of the step, from 0, among those that :meth:`epoch` gives.
            epoch: number of the epoch; by default a whole one.
        """
        check_counts(least=0, step=step)
        if epoch is None:
            return rows_in_step(self._num_rows, self._world_size, self._batch_size, step)
        before = step * self._batch_size
        return [min(max(rows - before, 0), self._batch_size) for rows in self.rows_in_epoch(epoch)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that the next iteration over the feed gives."""
        check_counts(least=0, epoch=epoch)
        self._epoch, self._given = int(epoch), 0

    def __iter__(self) -> Generator[dict[str, npt.NDArray[Any]], None, None]:
        """Give the batches of the current epoch, as :meth:`epoch` does; then the next epoch is the current one."""
        return self.epoch(self._epoch)

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse, with what to do: a DataLoader asks for items where it is given no ``IterableDataset``."""
        raise no_map_of_rows(self)

    def epoch(self, epoch: int) -> Generator[dict[str, npt.NDArray[Any]], None, None]:
        """Yield the batches of an epoch, or what is left of it; reading ahead begins with the first ``next``.

        Args:
            epoch: number of the epoch, from 0.

        Yields:
            By name an array of shape ``(rows, *column.shape)`` and the column's dtype, writable,
            perhaps strided, and the caller's to keep. The last batch has no rows where this shard is a row
            shorter than others.

        Raises:
            DataError: if a file cannot be read, or holds something else than the dataset says; it names file
                and row group.
        """
        check_counts(least=0, epoch=epoch)
        if self._reader.is_closed:
            raise ParamError("The feed is closed; make a new one.")
        epoch = int(epoch)
        steps = self.steps_in(epoch)
        self._epoch, self._given = epoch, 0
        with ExitStack() as stack:
            started = time.perf_counter()
            blocks = self._reader.blocks(self._schedule.slice_of(epoch), self._rank, self._row_counts, stack)
            batches = cut_batches(blocks, self._batch_size)
            nothing = self._layout.allocate(0)
            for step in range(steps):
                batch = self._layout.unpack(next(batches, nothing))
                # Before it is given: a state that is taken while the batch is used has it behind.
                self._epoch, self._given = epoch, step + 1
                self._reader.waited_s += time.perf_counter() - started
                yield batch
                started = time.perf_counter()
        self._epoch, self._given = epoch + 1, 0

    def state(self, given: int | None = None, epoch: int | None = None) -> dict[str, Any]:
        """Return where the feed stands, for :meth:`resume`: a small dict for JSON, the same on every rank.

        Args:
            given: how many batches of the current iteration count as used; by default all that it gave. Pass it
                where batches are taken ahead of their use.
            epoch: number of the epoch that they are of, likewise; by default the current one.
        """
        given = self._given if given is None else given
        epoch = self._epoch if epoch is None else epoch
        check_counts(least=0, given=given, epoch=epoch)
        return to_json(self._schedule.progress(int(epoch), int(given) * self._batch_size), self._identity)

    def state_running_on(self, epoch: int, num_rows: int) -> dict[str, Any]:
        """Return the state in which each rank has had so many rows from an epoch on, whatever this feed gave.

        For those who take rows across the borders of epochs, as a :class:`BlendedFeed` does: a rank whose shard is a
        row shorter than others then comes to the next epoch before them.

        Args:
            epoch: number of the epoch that was begun with, or with what was left of it.
            num_rows: rows that each rank has had of it and of those that follow.
        """
        return to_json(self._schedule.progress_running_on(epoch, num_rows), self._identity)

    def twin(self, rank: int | None = None) -> ParquetFeed:
        """Return a feed of the same dataset that goes its own way through it, from the first epoch on.

        It shares this one's cache and bounds; closing one of them closes both.

        Args:
            rank: whose rows it gives; by default this one's.
        """
        twin = copy(self)
        twin._rank = self._rank if rank is None else rank
        twin._schedule = self._schedule.afresh()
        twin._epoch = twin._given = 0
        return twin

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue where another feed of this dataset stood; it becomes the current epoch.

        On as many ranks, and with as large a shuffle buffer, the rows are those that would have come, in their order.
        Otherwise the unread rows are divided again, and each of them comes once. The batch size may be
        another.

        Args:
            state: what :meth:`state` returned on any rank.

        Raises:
            ParamError: if it is no state of a feed; it names the part that cannot be.
            DataError: if the state is of another dataset or seed, of another kind of order, or of a row filter that
                other numbers of rows of the row groups pass. Another filter that as many rows of each pass is not
                noticed.
        """
        progress = from_json(state, self._identity)
        self._schedule.resume(progress)
        self._epoch, self._given = progress.epoch, 0

    def seek(self, epoch: int, step: int = 0) -> None:
        """Begin an epoch at one of its batches, without reading those before; it becomes the current epoch.

        Args:
            epoch: number of the epoch, from 0.
            step: number of the batch, from 0, among the ``steps_per_epoch`` of the whole epoch, as this feed's ranks
                and batch size divide it. What was resumed before, or sought, is forgotten.
        """
        check_counts(least=0, epoch=epoch, step=step)
        if step >= self.steps_per_epoch:
            raise ParamError(f"An epoch has {self.steps_per_epoch} batches, counted from 0; got step {step}.")
        self.set_epoch(epoch)
        self._schedule.seek(int(epoch), int(step) * self._batch_size)

    def close(self) -> None:
        """End all threads but those that a Store keeps waiting; epochs that are under way cannot continue.

        Calling it again does nothing.
        """
        self._reader.close()

    def __enter__(self) -> ParquetFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
