"""The part of pyarrow's former ``ParquetDataset`` (removed in pyarrow 16) that Petastorm 0.12.1 uses.

Implemented on current pyarrow: a folder, hive-partitioned or not, is a list of pieces, each a file or one row group.
The filters of the former ``ParquetDataset`` select which partition folders are read.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fsspec.implementations.local
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.dataset.arrow import CHECKING
from sparkdl.data.dataset.table_logs import refuse_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "in": lambda value, wanted: value in wanted,
    "not in": lambda value, wanted: value not in wanted,
}


def accepts(filters: Any, values: Mapping[str, Any]) -> bool:
    """Return whether a piece passes the filters.

    Args:
        filters: list of (column, operator, value) triples that must all hold, or a list of such lists. Of these,
            one must hold.
        values: the piece's values of the partition columns. A triple on any other column always holds, because rows
            are not read.

    Raises:
        ValueError: if an operator is unknown or does not suit its value.
    """
    if not filters:
        return True
    alternatives = [filters] if isinstance(filters[0][0], str) else filters
    return any(all(_holds(condition, values) for condition in conditions) for conditions in alternatives)


def _holds(condition: tuple[str, str, Any], values: Mapping[str, Any]) -> bool:
    column, name, wanted = condition
    if column not in values:
        return True
    if name not in _OPERATORS:
        raise ValueError(f"Unknown filter operator {name!r}; there are {', '.join(_OPERATORS)}.")
    is_membership = name.endswith("in")
    is_collection = isinstance(wanted, Collection) and not isinstance(wanted, str)
    if is_membership != is_collection:
        raise ValueError(f"Filter operator {name!r} cannot be used with the value {wanted!r}.")
    if is_membership and not wanted:
        return name == "not in"
    sample = next(iter(wanted)) if is_membership else wanted
    return _OPERATORS[name](type(sample)(values[column]), wanted)


class LocalFileSystem(fsspec.implementations.local.LocalFileSystem):
    """Replacement of ``pyarrow.filesystem.LocalFileSystem``, which opens files for reading with pyarrow."""

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file."""
        return pa.OSFile(path, "rb") if mode == "rb" else super().open(path, mode, **options)


LOCAL_FILESYSTEM = LocalFileSystem()


@dataclass(eq=False)
class PartitionSet:
    """The values of one level of partition folders."""

    name: str
    keys: list[str] = field(default_factory=list)

    def get_index(self, key: str) -> int:
        """Return the position of a value, adding it if it is new."""
        if key not in self.keys:
            self.keys.append(key)
        return self.keys.index(key)

    @property
    def dictionary(self) -> pa.Array:
        """The values as an Arrow array of integers, or of strings if a value is not an integer."""
        try:
            return pa.array([int(key) for key in self.keys])
        except ValueError:
            return pa.array(self.keys, pa.string())


class ParquetPartitions(list[PartitionSet]):
    """The levels of partition folders, outermost first."""

    @property
    def partition_names(self) -> set[str]:
        """Names of the partition columns."""
        return {level.name for level in self}


@dataclass(frozen=True)
class ParquetDatasetPiece:
    """One file, or one of its row groups, with the arguments of pyarrow's class.

    Attributes:
        path: path of the file.
        open_file_func: function that opens a path.
        file_options: not used.
        row_group: number of the row group inside the file; None for the whole file.
        partition_keys: name of each level of partition folders, and position of the file's value in it.
    """

    path: str
    open_file_func: Callable[[str], Any] = field(default=LOCAL_FILESYSTEM.open, compare=False, repr=False)
    file_options: Any = field(default=None, compare=False, repr=False)
    row_group: int | None = None
    partition_keys: tuple[tuple[str, int], ...] = ()

    def get_metadata(self) -> pq.FileMetaData:
        """Return the footer of the file."""
        with self.open_file_func(self.path) as file:
            return pq.read_metadata(file)

    def read(
        self,
        columns: Sequence[str] | None = None,
        use_threads: bool = True,
        partitions: ParquetPartitions | None = None,
        **_: Any,
    ) -> pa.Table:
        """Return the rows as a table, with the values of partition folders as dictionary columns."""
        options = {"columns": None if columns is None else list(columns), "use_threads": use_threads}
        with (
            self.open_file_func(self.path) as source,
            # Spark writes a checksum for every page; if it is not verified, flipped bits are read as numbers.
            pq.ParquetFile(source, **CHECKING) as file,
        ):
            table = (
                file.read(**options)
                if self.row_group is None
                else file.read_row_group(self.row_group, **options)
            )
        for level, (name, index) in enumerate(self.partition_keys):
            assert partitions is not None, "pieces with partition keys come from a partitioned dataset"
            codes = pa.array(np.full(table.num_rows, index, dtype=np.int32))
            values = pa.DictionaryArray.from_arrays(codes, partitions[level].dictionary)
            table = table.append_column(name, values)
        return table


class FormerParquetDataset:
    """A folder, a file, or a list of files: the former ``ParquetDataset``."""

    def __init__(
        self, path_or_paths: str | list[str], filesystem: Any = None, filters: Any = None, **_: Any
    ) -> None:
        self.fs = _as_filesystem(filesystem)
        self.paths = path_or_paths
        self.partitions: ParquetPartitions | None = None
        self.metadata_path: str | None = None
        self.common_metadata_path: str | None = None
        paths = [path_or_paths] if isinstance(path_or_paths, str) else list(path_or_paths)
        if len(paths) == 1 and self.fs.isdir(paths[0]):
            refuse_tables(self.fs, paths[0].rstrip("/"), paths[0])
            self.partitions = ParquetPartitions()
            pieces = list(self._visit(0, paths[0].rstrip("/"), ()))
            self.pieces = sorted(pieces, key=lambda piece: piece.path)
        else:
            missing = [path for path in paths if not self.fs.isfile(path)]
            if missing:
                raise OSError(f"Passed non-file path: {missing[0]}")
            self.pieces = [ParquetDatasetPiece(path, self.fs.open) for path in paths]
        self.metadata = self._read_footer(self.metadata_path)
        self.common_metadata = self._read_footer(self.common_metadata_path or self.metadata_path)
        if filters is not None:
            self.pieces = [piece for piece in self.pieces if self._is_wanted(piece, filters)]

    def _is_wanted(self, piece: ParquetDatasetPiece, filters: Any) -> bool:
        if self.partitions is None:
            return True
        values = {
            name: self.partitions[level].dictionary[index].as_py()
            for level, (name, index) in enumerate(piece.partition_keys)
        }
        return accepts(filters, values)

    def _read_footer(self, path: str | None) -> Any:
        if path is None:
            return None
        with self.fs.open(path) as file:
            return pq.read_metadata(file)

    def _visit(
        self, level: int, folder: str, keys: tuple[tuple[str, int], ...]
    ) -> Iterator[ParquetDatasetPiece]:
        assert self.partitions is not None
        # Of the two, only os.walk counts links to folders as folders.
        walk = os.walk if isinstance(self.fs, LocalFileSystem) else self.fs.walk
        _, folders, names = next(iter(walk(folder)))
        files = []
        for name in names:
            if name.endswith("_common_metadata"):
                self.common_metadata_path = f"{folder}/{name}"
            elif name.endswith("_metadata"):
                self.metadata_path = f"{folder}/{name}"
            elif not (name.endswith((".crc", "_$folder$")) or name.startswith((".", "_"))):
                files.append(f"{folder}/{name}")
        folders = sorted(name for name in folders if name[0] != "." and (name[0] != "_" or "=" in name))
        if files and folders:
            raise ValueError(f"Found files in an intermediate directory: {folder}")
        for name in folders:
            column, _, value = name.partition("=")
            if level == len(self.partitions):
                self.partitions.append(PartitionSet(column))
            key = (column, self.partitions[level].get_index(value))
            yield from self._visit(level + 1, f"{folder}/{name}", (*keys, key))
        for path in sorted(files):
            yield ParquetDatasetPiece(path, self.fs.open, partition_keys=keys)


def _as_filesystem(filesystem: Any) -> Any:
    if filesystem is None:
        return LOCAL_FILESYSTEM
    if isinstance(filesystem, pa.fs.FileSystem):
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(filesystem)
    return filesystem
