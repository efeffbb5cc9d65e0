"""Finding out what a folder of Parquet files holds, from the footers of the files alone.

Runs on the *driver*. Footers are read by several threads, as on object stores each costs a round trip.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.arrow_columns import describe_type, shape_of_first_row
from sparkdl.data.dataset import Column, ParquetDataset, RowGroup, missing_column_error
from sparkdl.data.filesystems import Location, absolute_url, open_location
from sparkdl.errors import CorruptFileError, DataError, FileVanishedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_NUM_THREADS = 16


@dataclass(frozen=True)
class _Footer:
    path: str
    metadata: Any
    schema: pa.Schema
    leaves: Mapping[str, int]
    """By column name the number of its leaf; the columns described here have one each."""

    def statistics(self, name: str) -> Iterator[Any]:
        """Yield the statistics of a column in every row group that has rows; None where there are none."""
        for index in range(self.metadata.num_row_groups):
            row_group = self.metadata.row_group(index)
            if row_group.num_rows:
                yield row_group.column(self.leaves[name]).statistics


def scan_dataset(
    url: str, columns: Sequence[str] | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> ParquetDataset:
    """Describe a folder of Parquet files.

    Args:
        url: URL of the folder. Files and folders whose name begins with ``_`` or ``.`` are left out, as Spark
            does.
        columns: the columns that matter, by default all.
        shapes: shapes of array columns where they are known; the others are taken from the first row, and a
            row of another shape is an error when it is read.

    Raises:
        DataError: if there are no Parquet files or no rows, a file is damaged, a column is missing or no
            number, or its type differs between files.
        StoreError: if the filesystem cannot be opened.
    """
    location = open_location(url)
    paths = list_parquet_files(location)
    if not paths:
        raise DataError(f"There are no Parquet files in {url}.")
    with ThreadPoolExecutor(min(_NUM_THREADS, len(paths))) as pool:
        footers = list(pool.map(lambda path: _read_footer(location, path), paths))
    row_groups = tuple(
        RowGroup(path=footer.path, index=index, num_rows=footer.metadata.row_group(index).num_rows)
        for footer in footers
        for index in range(footer.metadata.num_row_groups)
        if footer.metadata.row_group(index).num_rows
    )
    if not row_groups:
        raise DataError(f"The Parquet files in {url} have no rows.")
    names = list(footers[0].schema.names if columns is None else columns)
    described = _describe_columns(location, footers, row_groups[0], names, shapes or {})
    return ParquetDataset(url=absolute_url(url), columns=described, row_groups=row_groups)


def list_parquet_files(location: Location) -> list[str]:
    """Return the paths of the data files below a folder, relative to it and sorted."""
    location.filesystem.invalidate_cache()  # Spark writes behind the back of fsspec's listings
    found = []
    for path in location.filesystem.find(location.path):
        relative = str(path)[len(location.path) :].lstrip("/")
        is_private = any(part.startswith(("_", ".")) for part in relative.split("/"))
        if relative.endswith(".parquet") and not is_private:
            found.append(relative)
    return sorted(found)


def _read_footer(location: Location, path: str) -> _Footer:
    try:
        with location.open_file(f"{location.path}/{path}") as file:
            metadata = pq.read_metadata(file)
    except FileNotFoundError as error:
        raise FileVanishedError(
            f"The Parquet file {location.path}/{path} was there when the folder was listed, and is gone now. Wait "
            "until whoever writes to the folder is done."
        ) from error
    except pa.ArrowInvalid as error:
        raise CorruptFileError(
            f"The Parquet file {location.path}/{path} cannot be read: {error}. Write it again."
        ) from error
    except Exception as error:
        raise DataError(f"The Parquet file {location.path}/{path} cannot be read: {error}") from error
    schema = metadata.schema.to_arrow_schema()
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    leaves = {}
    for name in schema.names:
        inside = (index for index, leaf in enumerate(paths) if leaf == name or leaf.startswith(f"{name}."))
        leaves[name] = next(inside)
    return _Footer(path, metadata, schema, leaves)


def _describe_columns(
    location: Location,
    footers: Sequence[_Footer],
    first: RowGroup,
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Column, ...]:
    types = {name: _common_type(footers, name) for name in names}
    described = {name: describe_type(name, arrow_type) for name, arrow_type in types.items()}
    unknown = [name for name, (_, depth) in described.items() if depth and name not in shapes]
    known = {**_shapes_of_first_row(location, first, unknown), **shapes}
    return tuple(
        Column(
            name=name,
            dtype=dtype,
            shape=known[name] if depth else (),
            value_range=None if depth or "int" not in dtype else _value_range(footers, name),
            num_nulls=_num_nulls(footers, name),
        )
        for name, (dtype, depth) in described.items()
    )


def _common_type(footers: Sequence[_Footer], name: str) -> pa.DataType:
    common = None
    for footer in footers:
        if name not in footer.schema.names:
            if footer is footers[0]:
                raise missing_column_error(name, footer.schema.names)
            raise DataError(
                f"Column {name!r} is in {footers[0].path}, but not in {footer.path}. Write files of equal columns, or "
                "leave it out."
            )
        found = footer.schema.field(name).type
        if common is not None and found != common:
            raise DataError(
                f"Column {name!r} has the type {common} in {footers[0].path} and {found} in {footer.path}. "
                "Cast it to one type."
            )
        common = found
    return common


def _shapes_of_first_row(
    location: Location, first: RowGroup, names: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    if not names:
        return {}
    try:
        with (
            location.open_file(f"{location.path}/{first.path}") as source,
            pq.ParquetFile(source) as file,
        ):
            batch = next(file.iter_batches(batch_size=1, row_groups=[first.index], columns=list(names)))
    except Exception as error:
        raise DataError(f"The Parquet file {location.path}/{first.path} cannot be read: {error}") from error
    table = pa.Table.from_batches([batch])
    return {name: shape_of_first_row(table.column(name)) for name in names}


def _num_nulls(footers: Sequence[_Footer], name: str) -> int:
    return sum(
        statistics.null_count
        for footer in footers
        for statistics in footer.statistics(name)
        if statistics is not None and statistics.has_null_count
    )


def _value_range(footers: Sequence[_Footer], name: str) -> tuple[int, int] | None:
    lows, highs = [], []
    for footer in footers:
        for statistics in footer.statistics(name):
            if statistics is None or not statistics.has_min_max:
                return None
            lows.append(int(statistics.min))
            highs.append(int(statistics.max))
    return min(lows), max(highs)
