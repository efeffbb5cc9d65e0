"""The feed of one *rank*: its shard of a Parquet dataset as batches of NumPy arrays, epoch after epoch.

The caller chooses columns by name, or maps names of its own to one or several columns each.

Reader threads decode row groups and another thread shuffles their rows, ahead of the training loop and within a limit
in bytes. The result depends only on (seed, epoch), the rank and the world size, never on threads or timing. The caller
moves the batches to torch and to devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from copy import copy
from typing import TYPE_CHECKING, Any, NoReturn

import numpy.typing as npt

from sparkdl.checks import check_counts, check_integer, check_rank
from sparkdl.closing import Closing
from sparkdl.data.dataset.blocks import BlockLayout
from sparkdl.data.dataset.dataset import check_transform
from sparkdl.data.dataset.row_choice import RowFilter, as_row_choice
from sparkdl.data.feed.batches import cut_batches
from sparkdl.data.feed.cache import BlockCache
from sparkdl.data.feed.epoch_reader import EpochReader
from sparkdl.data.feed.shards import rows_per_rank, steps_per_epoch
from sparkdl.data.feed.sources import find_dataset
from sparkdl.data.feed.state import EpochSchedule, from_json, identity_of_feed, to_json
from sparkdl.data.files.threads import READ_AHEAD_BYTES
from sparkdl.errors import ParamError
from sparkdl.rendezvous.deadline import check_timeout

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from sparkdl.collective import Communicator
    from sparkdl.data.dataset.blocks import Block
    from sparkdl.data.dataset.dataset import ParquetDataset, Preparation
    from sparkdl.data.feed.sources import Source


def names_and_fields(columns: Any, transform: Any) -> tuple[list[str] | None, Any]:
    """Return the columns to read, and the columns to yield as :func:`layout_of` takes them; None stands for all.

    Only the columns to read are described; those of a filter may have types that only the filter understands.

    Raises:
        ParamError: if ``columns`` is empty, names a column twice, or is neither a list nor a mapping of names.
    """
    names = _names(columns)
    if transform is None:
        return names, columns
    return (None, columns) if isinstance(columns, Mapping) else (names, transform.selected_fields)


def _names(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    groups: list[Any] = []
    if isinstance(columns, Mapping):
        groups = [[field] if isinstance(field, str) else field for field in columns.values()]
    are_names = all(
        isinstance(names, Collection)
        and not isinstance(names, (str, bytes))
        and all(isinstance(name, str) for name in names)
        for names in (columns, *groups)
    )
    if not are_names or not len(columns) or len(set(columns)) != len(columns):
        raise ParamError(
            f"A feed needs columns, each named once; got {columns!r}. Give a list of column names, or a dict from "
            "names of your own to a column name or a list of column names each."
        )
    return list(dict.fromkeys(name for group in groups for name in group)) if groups else list(columns)


def not_indexable_error(feed: object) -> ParamError:
    """Return the error for a feed that is indexed by a number, as a DataLoader around it does."""
    return ParamError(
        f"A {type(feed).__name__} is iterable and cannot be indexed. For a DataLoader, write "
        "DataLoader(FeedDataset(feed), batch_size=None), with sparkdl.loaders.feed_dataset.FeedDataset."
    )


def layout_of(dataset: ParquetDataset | Preparation, columns: Any) -> BlockLayout:
    """Return the layout of the requested columns, or of all columns if that is None.

    Raises:
        DataError: if a column does not exist or cannot be fed.
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


SHUFFLE_BUFFER_BYTES = 64 << 20
"""Default upper bound of the memory of the shuffle buffer, in bytes."""

SHUFFLE_BUFFER_ROWS = 1 << 16
"""Default upper bound of the rows of the shuffle buffer: more of them do not fit into the processor's cache."""


class ParquetFeed(Closing):
    """Batches of one rank's rows.

    Iterating over a feed yields the batches of its current epoch and then moves on to the next one, so that
    ``for epoch in range(n): for batch in feed: ...`` is a training loop; :meth:`set_epoch` chooses the epoch.

    Args:
        source: data to read, the same on every rank: a :class:`ParquetDataset`, the URL or path of a folder of Parquet
            files or of a dataset in a Store, or a Store that holds one dataset. A folder that Petastorm's
            ``materialize_dataset`` wrote is decoded with the codecs of its Unischema, as by ``make_reader``.
        columns: names of the columns to read, by default all; batches hold them in this order. A mapping assigns
            other names, each to one column or to several scalar columns of one dtype, which form one matrix:
            ``{"features": ["a", "b"], "label": "y"}``. See ``transform`` for the meaning with a transform.
        shapes: lengths of the arrays at every level, by name of an array column in a folder of plain Parquet; None for
            a length that differs from row to row: ``{"tokens": (None,)}``. An array column that is not named must
            have the lengths of its first list in every row.
        rank: rank of this process.
        world_size: number of ranks.
        batch_size: rows per batch and rank.
        shuffle: whether to shuffle the row groups in every epoch, and then the rows in a buffer; otherwise
            rows come in the order of the files.
        seed: any integer; the same on every rank.
        num_threads: number of threads that read row groups, each one at a time. Arrow decodes the columns of a row
            group in its own thread pool (``pyarrow.set_cpu_count``, by default as many threads as there are cores),
            which the whole process shares.
        shuffle_buffer_rows: number of rows in the shuffle buffer, from which the next ones are drawn; by default
            65,536, or fewer if only those fit in 64 MiB.
        read_ahead_bytes: upper bound of the memory of decoded row groups and shuffled rows that wait to be used, not
            counting the shuffle buffer itself and the cache. A single row group is read even if it takes more.
        row_filter: rows to yield: a :class:`sparkdl.data.RowFilter`, the result of
            :func:`sparkdl.data.dataset.row_choice.draw_rows`, or a Petastorm predicate. If the number of rows that
            pass is not known, they are counted when the feed is made.
        transform: Petastorm's ``TransformSpec``, applied by the reader threads. A list of ``columns`` then names the
            columns that its function takes, as with Petastorm's ``schema_fields``; the columns that it returns follow
            from its ``edit_fields``, ``removed_fields`` and ``selected_fields``. A mapping of ``columns`` refers to
            the columns that the function returns, and the function takes all columns. The function takes a pandas
            DataFrame of rows of one row group, or with a Unischema a dict of one row, and must not change the number
            of rows. A cache keeps transformed rows.
        nulls: value in place of nulls, by column: ``{"price": 0.0, "kind": "none"}``. None stands for
            NaN, NaT and None; integers and booleans with NaN become float64. Nulls in other columns are an error. In a
            column of arrays of one length, the value replaces each null element, and all elements of a null array.
        communicator: communicator of all ranks, so that each rank counts its part of the row groups; making the feed
            is then a collective operation. Used only for a ``row_filter``.
        cache: where to keep decoded row groups after they were first read: ``"memory"``, ``"disk"`` for files that
            are removed when the feed is closed, or None. The cache does not change the order of the rows. Rows with
            strings or other objects in their columns, such as arrays of varying length, are kept only in memory; with
            ``"disk"`` they are read again in every epoch, and that is logged once.
        cache_limit_bytes: upper bound of the size of the cache; row groups that do not fit are read again, and that is
            logged once.
        cache_folder: folder for the cache's files; by default the system's folder for temporary files.
        read_timeout_s: seconds to wait for one row group before the read fails, also while the rows that pass the
            filter are counted; and seconds for describing the source, if it is not described yet.
        has_identity: whether the state says what the rows are, so that the feed resumes only on the same rows. False
            for a caller that compares the rows by itself, as a fit does.

    Attributes:
        dataset: the dataset that is read.
        steps_per_epoch: number of batches of every whole epoch, the same on all ranks.

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
        nulls: Mapping[str, Any] | None = None,
        communicator: Communicator | None = None,
        cache: str | None = None,
        cache_limit_bytes: int = 4 << 30,
        cache_folder: str | None = None,
        read_timeout_s: float = 600.0,
        has_identity: bool = True,
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
        check_rank(rank, world_size)
        check_integer(seed=seed)
        check_timeout(read_timeout_s, "read_timeout_s")
        # NumPy's integers cannot be put into the JSON of a state, and lack methods of Python's.
        rank, world_size, batch_size, seed = int(rank), int(world_size), int(batch_size), int(seed)
        num_threads, read_ahead_bytes = int(num_threads), int(read_ahead_bytes)
        cache_limit_bytes, read_timeout_s = int(cache_limit_bytes), float(read_timeout_s)
        if cache not in (None, "memory", "disk"):
            raise ParamError(f"cache must be 'memory', 'disk' or None, got {cache!r}.")
        chosen = as_row_choice(row_filter)
        check_transform(transform)
        names, fields = names_and_fields(columns, transform)
        self.dataset = find_dataset(source, names, shapes, timeout_s=read_timeout_s)
        if nulls:
            if transform is not None:
                raise ParamError(
                    "nulls and transform are both set. Fill the nulls in the function of the transform, which gets "
                    "them in the form that pandas gives them."
                )
            self.dataset = self.dataset.with_nulls(nulls)
        if isinstance(chosen, RowFilter):
            chosen = self.dataset.filter_of(chosen)
        preparation = self.dataset.preparation(transform, names)
        self._layout = layout_of(preparation or self.dataset, fields)
        rows_per_rank(self.dataset.num_rows, world_size)  # raises if a rank would have no rows
        if shuffle_buffer_rows is None:
            fitting = SHUFFLE_BUFFER_BYTES // max(1, self._layout.row_bytes)
            shuffle_buffer_rows = max(1, min(fitting, SHUFFLE_BUFFER_ROWS))
        buffer_rows = int(shuffle_buffer_rows) if shuffle else 0
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        self._reader = EpochReader(
            dataset=self.dataset,
            layout=self._layout,
            row_choice=chosen,
            preparation=preparation,
            num_threads=num_threads,
            read_ahead_bytes=read_ahead_bytes,
            timeout_s=read_timeout_s,
            buffer_rows=buffer_rows,
            cache=BlockCache(cache, cache_limit_bytes, cache_folder) if cache else None,
        )
        row_counts = self._reader.count_rows(communicator)
        self._num_rows = sum(row_counts)
        rows_per_rank(self._num_rows, world_size)  # likewise after the filter
        self.steps_per_epoch = steps_per_epoch(self._num_rows, world_size, batch_size)
        self._identity: dict[str, Any] = {}
        if has_identity:
            self._identity = identity_of_feed(self.dataset, row_counts, seed=seed, shuffle=shuffle)
        self._schedule = EpochSchedule(
            row_counts, world_size=world_size, buffer_rows=buffer_rows, seed=seed, shuffle=shuffle
        )
        self._epoch = 0
        self._given = 0

    @property
    def waited_s(self) -> float:
        """Seconds that the caller has waited for batches so far."""
        return self._reader.waited_s

    def __len__(self) -> int:
        """Number of batches of the next iteration: ``steps_per_epoch``, or fewer if the epoch was resumed."""
        return self.steps_in(self._epoch)

    def steps_in(self, epoch: int) -> int:
        """Return how many batches :meth:`epoch` yields: fewer than ``steps_per_epoch`` if the epoch was resumed."""
        return math.ceil(max(self.rows_in_epoch(epoch)) / self._batch_size)

    def rows_in_epoch(self, epoch: int) -> list[int]:
        """Return how many rows :meth:`epoch` yields on each rank: fewer if the epoch was resumed."""
        return self._schedule.plan_of(epoch).rows_to_come()

    def rows_in_step(self, step: int, epoch: int | None = None) -> list[int]:
        """Return how many rows each rank has in a step: ``batch_size`` in all but the last.

        Args:
            step: number of the step, from 0, among those of :meth:`epoch`.
            epoch: number of the epoch; None for a whole epoch.
        """
        check_counts(least=0, step=step)
        of_ranks = (
            rows_per_rank(self._num_rows, self._world_size) if epoch is None else self.rows_in_epoch(epoch)
        )
        before = step * self._batch_size
        return [min(max(rows - before, 0), self._batch_size) for rows in of_ranks]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, of the next iteration over the feed."""
        check_counts(least=0, epoch=epoch)
        self._epoch, self._given = int(epoch), 0

    def __iter__(self) -> Generator[dict[str, npt.NDArray[Any]], None, None]:
        """Yield the batches of the current epoch as :meth:`epoch` does; then the next epoch becomes the current one."""
        return self.epoch(self._epoch)

    def __getitem__(self, index: object) -> NoReturn:
        """Raise an error that says what to do: a DataLoader asks for items if it gets no ``IterableDataset``."""
        raise not_indexable_error(self)

    def epoch(self, epoch: int) -> Generator[dict[str, npt.NDArray[Any]], None, None]:
        """Yield the batches of an epoch, or the rest of a resumed one; reading ahead begins with the first ``next``.

        Args:
            epoch: number of the epoch, from 0.

        Yields:
            A dict of arrays by name, each of shape ``(rows, *column.shape)`` and of the column's dtype. The arrays
            are writable, possibly strided, and not used again by the feed. The last batch can have no rows if this
            shard is one row shorter than others.

        Raises:
            DataError: if a file cannot be read, or differs from the description of the dataset; the message names
                file and row group.
        """
        with ExitStack() as stack:
            yield from self.start_epoch(epoch, stack)

    def start_epoch(
        self, epoch: int, stack: ExitStack, *, num_streams: int = 1
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Start to read an epoch ahead, and return the batches that :meth:`epoch` yields; closing ``stack`` ends it.

        Args:
            epoch: number of the epoch, from 0.
            stack: exit stack.
            num_streams: number of epochs that are read at once and share the threads and ``read_ahead_bytes``.
        """
        check_counts(least=0, epoch=epoch)
        if self._reader.is_closed:
            raise ParamError("The feed is closed; make a new one.")
        epoch = int(epoch)
        self._epoch, self._given = epoch, 0
        started = time.perf_counter()
        plan = self._schedule.plan_of(epoch)
        blocks = self._reader.blocks(plan, self._rank, stack, num_streams=num_streams)
        self._reader.waited_s += time.perf_counter() - started
        return self._batches(epoch, cut_batches(blocks, self._batch_size))

    def _batches(self, epoch: int, batches: Iterator[Block]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        nothing = self._layout.allocate(0)
        for step in range(self.steps_in(epoch)):
            started = time.perf_counter()
            batch = self._layout.unpack(next(batches, nothing))
            # Before the batch is yielded: a state taken while the batch is in use counts it as used.
            self._epoch, self._given = epoch, step + 1
            self._reader.waited_s += time.perf_counter() - started
            yield batch
        self._epoch, self._given = epoch + 1, 0

    def state(self, given: int | None = None, epoch: int | None = None) -> dict[str, Any]:
        """Return the position of the feed for :meth:`resume`: a small dict for JSON, the same on every rank.

        Args:
            given: number of batches of the current iteration that count as used; by default all that were yielded.
                Pass it if batches are taken ahead of their use.
            epoch: number of the epoch of these batches, needed in the same case; by default the current one.
        """
        given = self._given if given is None else given
        epoch = self._epoch if epoch is None else epoch
        check_counts(least=0, given=given, epoch=epoch)
        return to_json(self._schedule.progress(int(epoch), int(given) * self._batch_size), self._identity)

    def state_across_epochs(self, epoch: int, num_rows: int) -> dict[str, Any]:
        """Return the state after each rank has had ``num_rows`` rows from an epoch on, whatever this feed has yielded.

        For callers that take rows across the borders of epochs, such as a :class:`BlendedFeed`: a rank whose shard is
        one row shorter than others then reaches the next epoch before them.

        Args:
            epoch: number of the first epoch, which may be a resumed one.
            num_rows: number of rows that each rank has had of this epoch and the following ones.
        """
        return to_json(self._schedule.progress_across_epochs(epoch, num_rows), self._identity)

    def twin(self, rank: int | None = None) -> ParquetFeed:
        """Return a feed of the same dataset with a position of its own, which starts at the first epoch.

        Both feeds share one cache and the same limits; closing one of them closes both.

        Args:
            rank: rank whose rows the new feed yields; by default the rank of this feed.
        """
        twin = copy(self)
        twin._rank = self._rank if rank is None else rank
        twin._schedule = self._schedule.afresh()
        twin._epoch = twin._given = 0
        return twin

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another feed of this dataset; its epoch becomes the current one.

        With the same number of ranks and the same shuffle buffer, the remaining rows come in the order that they would
        have had without the interruption. Otherwise the unread rows are divided again, and each of them comes once.
        The batch size may differ.

        Args:
            state: state that :meth:`state` returned on any rank.

        Raises:
            ParamError: if it is not a state of a feed.
            DataError: if the state has a newer format, or is of another dataset, seed or value of ``shuffle``, or if
                another number of rows of a row group passes the row filter. Another filter that passes the same number
                of rows of each row group is not detected.
        """
        progress = from_json(state, self._identity)
        self._schedule.resume(progress)
        self._epoch, self._given = progress.epoch, 0

    def seek(self, epoch: int, step: int = 0) -> None:
        """Begin an epoch at one of its batches, without reading the earlier ones; it becomes the current epoch.

        Earlier calls of :meth:`resume` and :meth:`seek` have no effect any more.

        Args:
            epoch: number of the epoch, from 0.
            step: number of the batch, from 0, among the ``steps_per_epoch`` of the whole epoch, as divided by this
                feed's number of ranks and batch size.
        """
        check_counts(least=0, epoch=epoch, step=step)
        if step >= self.steps_per_epoch:
            raise ParamError(f"An epoch has {self.steps_per_epoch} batches, counted from 0; got step {step}.")
        self.set_epoch(epoch)
        self._schedule.seek(int(epoch), int(step) * self._batch_size)

    def close(self) -> None:
        """Stop all threads except those that wait for a Store; epochs in progress cannot continue.

        Calling it again does nothing.
        """
        self._reader.close()
