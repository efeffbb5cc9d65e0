"""Describes a folder of Parquet files from the footers of the files, and arrays and objects also from the first rows.

Runs on the *driver*, and wherever a feed of a folder is made. Several threads read the footers, because each footer
costs a round trip on object stores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.dataset.arrow import (
    CHECKING,
    SAMPLED_BYTES,
    content_leaf,
    describe_type,
    is_list,
    plain_columns,
    shape_of_first_row,
    value_type,
    warn_if_unchecked,
    with_object_sizes,
)
from sparkdl.data.dataset.column_chunks import ColumnChunk, parse_footer
from sparkdl.data.dataset.dataset import Column, ParquetDataset, RowGroup, folder_values, missing_column_error
from sparkdl.data.dataset.delta_tables import files_of_delta
from sparkdl.data.dataset.row_group_file import RowGroupFile, is_damage
from sparkdl.data.dataset.table_logs import DELTA_LOG, is_log, refuse_tables
from sparkdl.data.files.changed_files import version_of
from sparkdl.data.files.filesystems import Location, absolute_url, open_location
from sparkdl.errors import (
    ColumnMismatchError,
    CorruptFileError,
    DataError,
    EmptyDatasetError,
    FileVanishedError,
    ParamError,
    StoreAccessError,
)
from sparkdl.foreign_errors import describe_reading_failure, one_line, reading_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_SUFFIX = ".parquet"
_NUM_NAMED = 3


def find_parquet_files(location: Location, url: str) -> list[str]:
    """Return the paths of :func:`list_parquet_files`, at least one.

    Args:
        location: location of the folder.
        url: URL of the folder as the user spells it, for error messages.

    Raises:
        DataError: if there are none; the message says whether the folder exists, and what it holds instead. Or if the
            folder belongs to a table whose log says which files and rows are valid, other than a Delta table all rows
            of whose files are valid.
        StoreAccessError: if the filesystem cannot be read.
    """
    with reading_from(url):
        paths = _paths_below(location)
        if is_log(location.filesystem, f"{location.path}/{DELTA_LOG}"):
            return files_of_delta(location, url)
        refuse_tables(location.filesystem, location.path, url, paths)
        files = _data_files(paths)
        if not files:
            raise _no_files_error(location, url)
    return files


def list_parquet_files(location: Location) -> list[str]:
    """Return the paths of the data files below a folder, relative to it and sorted."""
    return _data_files(_paths_below(location))


def urls_for_spark(url: str) -> list[str]:
    """Return the URLs under which Spark's reader of plain Parquet finds a file, a folder, or a Delta table's files.

    Raises:
        DataError: if it is a folder that belongs to a table whose log says which files and rows are valid, other than a
            Delta table all rows of whose files are valid.
    """
    try:
        location = open_location(url)
        filesystem = location.filesystem
        patterns = _without_braces(location.path)
        has_pattern = len(patterns) > 1 or any(character in location.path for character in "*?[")
        matches = (
            [path for pattern in patterns for path in filesystem.glob(pattern)]
            if has_pattern
            else [location.path]
        )
        folders = [path for path in matches if not filesystem.isfile(path)]
        paths = {folder: _paths_below(replace(location, path=folder)) for folder in folders}
        is_delta = not has_pattern and is_log(location.filesystem, f"{location.path}/{DELTA_LOG}")
    except Exception:  # Spark alone has the plugin or the credentials for the filesystem
        return [url]
    root = url if location.is_local else location.spark_url
    if is_delta:
        files = files_of_delta(location, url, without_partitions=True)
        return [f"{root.rstrip('/')}/{path}" for path in files]
    for folder, below in paths.items():
        refuse_tables(filesystem, folder, url, below)
    return [root]


def _without_braces(pattern: str) -> list[str]:
    """Return the patterns that a pattern of Hadoop with alternatives, such as ``{a,b}``, stands for."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [
        alternative for part in match[1].split(",") for alternative in _without_braces(before + part + after)
    ]


def _paths_below(location: Location) -> list[str]:
    # If the location is a file, fsspec finds the file itself, whose path inside the folder is empty.
    relative = (path[len(location.path) :].lstrip("/") for path in location.find_files())
    return sorted(path for path in relative if path)


def _data_files(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if path.endswith(_SUFFIX) and not _is_private(path)]


def _is_private(path: str) -> bool:
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.split("/"))


def _no_files_error(location: Location, url: str) -> DataError:
    filesystem: Any = location.filesystem
    if "*" in url:
        return DataError(
            f"{url} is a pattern, and a folder is needed. Give the folder of the files; for some of its files, "
            "scan_dataset(folder, paths=[...])."
        )
    if not filesystem.exists(location.path):
        # Object stores have no folders: one without files does not exist.
        return EmptyDatasetError(
            f"There is nothing at {url}. Fix the path, or wait until the files are there."
        )
    if filesystem.isfile(location.path):
        folder, _, name = url.rstrip("/").rpartition("/")
        return DataError(
            f"{url} is a file, and a folder is needed. Give the folder, or for this file alone "
            f"scan_dataset({folder or '/'!r}, paths=[{name!r}])."
        )
    others = [path for path in _paths_below(location) if not _is_private(path)]
    if not others:
        return EmptyDatasetError(f"There are no Parquet files in {url}: the folder is empty.")
    named = ", ".join(others[:_NUM_NAMED]) + (", ..." if len(others) > _NUM_NAMED else "")
    return EmptyDatasetError(
        f"There are no Parquet files in {url}: names have to end in {_SUFFIX}, and there are {named}. Name them so, or "
        "give the files as scan_dataset(folder, paths=[...])."
    )


_NUM_THREADS = 16
_BATCH_ROWS = 16
_NUM_SEARCHED = 4096
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class _Footer:
    path: str
    where: str
    """Path or URL of the file, for error messages."""
    num_rows: tuple[int, ...]
    """Number of rows of every row group."""
    schema: pa.Schema
    version: str | None
    leaves: Mapping[str, range]
    """Numbers of the leaves of each column, by column name."""
    row_groups: Sequence[Sequence[ColumnChunk]]
    """Chunks of every row group, by the number of the leaf."""
    int96: frozenset[str]
    """Columns of INT96, the type of instants that Spark writes, which have no time zone in their Arrow type."""

    @cached_property
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name, because looking up a name in a schema searches all of its names."""
        return {field.name: value_type(field.type) for field in self.schema}

    def chunks(self, name: str) -> Iterator[ColumnChunk]:
        """Yield the chunks of a column's values in every row group that has rows; for an image, those of its data."""
        leaf = self.leaves[name][content_leaf(self.types[name])]  # all columns but images have one leaf
        for num_rows, chunks in zip(self.num_rows, self.row_groups, strict=True):
            if num_rows:
                yield chunks[leaf]

    def num_bytes(self, name: str, row_group: int) -> int:
        """Return the bytes of the encoded values of a column in a row group, before compression."""
        return sum(self.row_groups[row_group][leaf].num_bytes for leaf in self.leaves[name])


def scan_dataset(
    url: str,
    columns: Sequence[str] | None = None,
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
    paths: Sequence[str] | None = None,
) -> ParquetDataset:
    """Describe a folder of Parquet files.

    Args:
        url: URL of the folder. Files and folders whose name begins with ``_`` or ``.`` are left out, as in
            Spark, except folders of a partition column such as ``_day=7``.
        columns: names of the columns to describe; by default all.
        shapes: known shapes of array columns, by name. Other shapes are taken from the first list, and a row of another
            shape is an error when it is read. None stands for a length that differs from row to row; such a
            column is fed as one array per row.
        paths: paths of the files inside the folder, in the order of their rows; by default all files, by name.

    Raises:
        EmptyDatasetError: if there are no Parquet files or no rows.
        CorruptFileError: if a file is damaged.
        ColumnMismatchError: if the type of a column differs between files.
        DataError: if a column is missing or has a type that the feed does not support.
        StoreAccessError: if the folder cannot be listed, or its filesystem cannot be reached.
        ParamError: if a shape is given for a column that has no arrays, or more or fewer levels of them than the shape.
        StoreError: if the filesystem cannot be opened.
    """
    warn_if_unchecked()
    location = open_location(url)
    paths = find_parquet_files(location, url) if paths is None else list(paths)
    if not paths:
        raise DataError(f"No files of {url} were given; name at least one in paths.")
    with ThreadPoolExecutor(min(_NUM_THREADS, len(paths))) as pool:
        all_footers = list(pool.map(lambda path: _read_footer(location, path), paths))
    # Writers that find types in the values, as pandas does, give a file without rows other types, or no columns.
    footers = [footer for footer in all_footers if any(footer.num_rows)]
    row_groups = tuple(
        RowGroup(path=footer.path, index=index, num_rows=num_rows)
        for footer in footers
        for index, num_rows in enumerate(footer.num_rows)
        if num_rows
    )
    if not row_groups:
        raise EmptyDatasetError(f"The Parquet files in {url} have no rows.")
    names = list(footers[0].schema.names if columns is None else columns)
    described = _describe_columns(location, footers, row_groups[0], names, shapes or {})
    versions = {footer.path: footer.version for footer in footers if footer.version is not None}
    return ParquetDataset(url=absolute_url(url), columns=described, row_groups=row_groups, versions=versions)


def _read_footer(location: Location, path: str) -> _Footer:
    where = location.name_of(f"{location.path}/{path}")
    try:
        with location.open_file(f"{location.path}/{path}") as file:
            version = version_of(file, f"{location.path}/{path}")
            metadata, leaves, row_groups = parse_footer(file)
        schema = metadata.schema.to_arrow_schema()
    except FileNotFoundError as error:
        raise FileVanishedError(
            f"There is no Parquet file {where}. Fix its name if you gave it; if it was removed while the folder was "
            "listed, wait until the program that writes to the folder is done."
        ) from error
    except Exception as error:
        why = describe_reading_failure(error)
        if why:
            raise StoreAccessError(f"{where} cannot be read: {why}") from error
        if is_damage(error):
            raise CorruptFileError(
                f"The Parquet file {where} cannot be read: {one_line(error)} Write it again."
            ) from error
        raise DataError(f"The Parquet file {where} cannot be read: {error}") from error
    num_rows = tuple(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    by_name = dict(zip(schema.names, leaves, strict=True))
    int96 = frozenset(
        name
        for name, numbers in by_name.items()
        if len(numbers) and metadata.schema.column(numbers[-1]).physical_type == "INT96"
    )
    return _Footer(path, where, num_rows, schema, version, by_name, row_groups, int96)


def _describe_columns(
    location: Location,
    footers: Sequence[_Footer],
    first: RowGroup,
    names: Sequence[str],
    shapes: Mapping[str, tuple[int | None, ...]],
) -> tuple[Column, ...]:
    types = {name: _common_type(footers, name) for name in names}
    described = {}
    for name, arrow_type in types.items():
        try:
            described[name] = describe_type(name, arrow_type)
        except DataError as error:
            raise DataError(f"{footers[0].where} cannot be fed: {error}") from error
    for name, shape in shapes.items():
        if name not in footers[0].types:
            raise missing_column_error(name, footers[0].schema.names)
        if name in described:
            _check_shape(name, shape, described[name][2])
    unknown = [name for name, (_, _, depth) in described.items() if depth and name not in shapes]
    known = dict(shapes)
    if unknown:
        known.update(_first_shapes(_first_rows(location, first, unknown, 1, 1)))
        nothing = [name for name in unknown if 0 in known[name]]
        if nothing:  # they may be null in the first row
            known.update(_first_shapes(_first_rows(location, first, nothing, _NUM_SEARCHED, SAMPLED_BYTES)))
    columns = [
        _describe_column(footers, name, kind, dtype, tuple(known[name]) if depth else ())
        for name, (kind, dtype, depth) in described.items()
    ]
    footer = next(footer for footer in footers if footer.path == first.path)
    return with_object_sizes(
        columns, partial(_first_rows, location, first), partial(footer.num_bytes, row_group=first.index)
    )


def _first_shapes(table: pa.Table) -> dict[str, tuple[int, ...]]:
    return {name: shape_of_first_row(table.column(name)) for name in table.column_names}


def _check_shape(name: str, shape: Any, depth: int) -> None:
    is_shape = isinstance(shape, Sequence) and all(
        length is None or (isinstance(length, int) and length >= 0) for length in shape
    )
    if not depth or not is_shape or len(shape) != depth:
        has = f"has {depth} levels of arrays" if depth > 1 else "is an array" if depth else "is not an array"
        raise ParamError(
            f"shapes gives {shape!r} for column {name!r}, which {has}. Give a length for each level of arrays, None "
            "where it differs from row to row."
        )


def _describe_column(
    footers: Sequence[_Footer], name: str, kind: str, dtype: str, lengths: tuple[int | None, ...]
) -> Column:
    num_nulls = sum(chunk.num_nulls or 0 for footer in footers for chunk in footer.chunks(name))
    if None in lengths:
        return Column(
            name=name,
            dtype="object",
            kind="ragged",
            lengths=lengths,
            element=(kind, dtype),
            is_utc=_is_utc(footers[0], name),
            num_nulls=num_nulls,
            object_bytes=_object_bytes(footers, name),
        )
    return Column(
        name=name,
        dtype=dtype,
        kind=kind,
        shape=tuple(length for length in lengths if length is not None),
        is_utc=_is_utc(footers[0], name),
        value_range=_value_range(footers, name, signed=dtype.startswith("int"))
        if not lengths and "int" in dtype
        else None,
        num_nulls=num_nulls,
        object_bytes=_object_bytes(footers, name) if dtype == "object" else 0,
    )


def _is_utc(footer: _Footer, name: str) -> bool:
    """Whether a column holds instants."""
    element = footer.types[name]
    while is_list(element):
        element = element.value_type
    return pa.types.is_timestamp(element) and (element.tz is not None or name in footer.int96)


def _common_type(footers: Sequence[_Footer], name: str) -> pa.DataType:
    common = None
    for footer in footers:
        if name not in footer.types:
            if footer is footers[0]:
                if name in folder_values(footer.path):
                    raise DataError(
                        f"Column {name!r} is a partition column: its values are in folder names ({footer.path}) and "
                        "not in the files, and a feed reads only the files. Write the files with that column in them, "
                        "as sparkdl.data.materialize does."
                    )
                raise missing_column_error(name, footer.schema.names)
            raise ColumnMismatchError(
                f"Column {name!r} is in {footers[0].where}, but not in {footer.where}. Write files of equal columns, "
                "or leave it out."
            )
        arrow_type = footer.types[name]
        if common is not None and arrow_type != common:
            raise ColumnMismatchError(
                f"Column {name!r} has the type {common} in {footers[0].where} and {arrow_type} in {footer.where}. "
                "Cast it to one type."
            )
        common = arrow_type
    return common


def _first_rows(
    location: Location, first: RowGroup, names: Sequence[str], num_rows: int, num_bytes: int
) -> pa.Table:
    """Read the first rows of a row group: at most ``num_rows``, and no more once they take ``num_bytes``."""
    batches: list[pa.RecordBatch] = []
    try:
        with (
            location.open_file(f"{location.path}/{first.path}") as source,
            # Through a buffer; otherwise the complete columns of the row group are read at once.
            pq.ParquetFile(source, **CHECKING, buffer_size=_BUFFER_BYTES) as file,
        ):
            size = min(num_rows, _BATCH_ROWS)
            for batch in file.iter_batches(batch_size=size, row_groups=[first.index], columns=list(names)):
                batches.append(batch)
                num_bytes -= batch.nbytes
                if num_bytes <= 0 or sum(map(len, batches)) >= num_rows:
                    break
    except Exception as error:
        path = f"{location.path}/{first.path}"
        row_group = RowGroupFile(path, location.open_file, first.index, location.name_of(path))
        raise row_group.error(error, names) from error
    return plain_columns(pa.Table.from_batches(batches).slice(0, num_rows), names)


def _object_bytes(footers: Sequence[_Footer], name: str) -> int:
    """Return the average bytes of the encoded values of a row, before compression."""
    num_rows = sum(sum(footer.num_rows) for footer in footers)
    total = sum(footer.num_bytes(name, index) for footer in footers for index in range(len(footer.num_rows)))
    return max(1, total // max(1, num_rows))


def _value_range(footers: Sequence[_Footer], name: str, *, signed: bool) -> tuple[int, int] | None:
    ranges = [chunk.int_range(signed=signed) for footer in footers for chunk in footer.chunks(name)]
    known = [limits for limits in ranges if limits is not None]
    if len(known) < len(ranges):
        return None
    return min(low for low, _ in known), max(high for _, high in known)
