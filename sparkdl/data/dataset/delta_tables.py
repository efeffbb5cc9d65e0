"""The files of a Delta table that may be read in place: those of its newest version, if all of their rows are valid.

The only door to ``deltalake``, which reads the log; the rows are read as those of other Parquet files. A table with
deletion vectors has rows in its files that are not valid, and one with column mapping other names of columns. Spark
reads both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

from sparkdl.data.dataset.table_logs import refuse_tables
from sparkdl.errors import DataError, count_of
from sparkdl.foreign_errors import how_to_install

if TYPE_CHECKING:
    from sparkdl.data.files.filesystems import Location

_HARMLESS = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",  # only if the table's configuration turns it on
        "deletionVectors",  # only if a file has one
        "domainMetadata",
        "generatedColumns",
        "identityColumns",
        "inCommitTimestamp",
        "invariants",
        "rowTracking",
        "timestampNtz",
        "typeWidening",  # a column whose type differs between files is refused as in other folders
        "v2Checkpoint",
        "variantType",  # such columns cannot be fed
        "vacuumProtocolCheck",
    }
)
"""Features of a table that leave the rows of its files as they are."""


def files_of_delta(location: Location, url: str, *, without_partitions: bool = False) -> list[str]:
    """Return the paths of a Delta table's files, relative to its folder and sorted.

    Args:
        location: location of the table.
        url: the table as the user spells it, for error messages.
        without_partitions: whether a table with partition columns, whose values are not in the files, is refused.

    Raises:
        DataError: if deltalake is not installed or cannot read the log, or the rows of the files are not those of the
            table; the message says why, and how Spark reads it.
    """
    paths, why = _files(location, without_partitions=without_partitions)
    if why:
        refuse_tables(location.filesystem, location.path, url, why=why)
        raise DataError(f"{url} cannot be read in place: {why}")  # its log has vanished
    return paths


def _files(location: Location, *, without_partitions: bool) -> tuple[list[str], str]:
    """Return the files, and why they cannot be read in place; an empty text if they can."""
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        advice = how_to_install("delta", "deltalake")
        return [], f"It could be read in place with deltalake, which cannot be imported: {error}. {advice}"
    try:
        table = DeltaTable(location.name_of(location.path))
        features = set(table.protocol().reader_features or ()) - _HARMLESS
        metadata = table.metadata()
        mapping = metadata.configuration.get("delta.columnMapping.mode", "none")
        num_vectors = table.deletion_vectors().read_all().num_rows
        logged = pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()
    except Exception as error:  # any error of a library in Rust, which has classes of its own
        return [], f"deltalake cannot read its log: {type(error).__name__}: {error}".rstrip(".") + "."
    if num_vectors:
        return [], f"It has deletion vectors, which mark rows of {count_of(num_vectors, 'file')} as removed."
    if mapping != "none":
        return [], "It has column mapping, with other names of columns in its files."
    if features:
        return (
            [],
            f"It has the features {', '.join(sorted(features))}, so that its files alone do not give its rows.",
        )
    if without_partitions and metadata.partition_columns:
        return [], f"Its columns {', '.join(metadata.partition_columns)} are not in its files."
    if not logged:
        return [], "It has no rows."
    paths = sorted(map(unquote, logged))  # the log has them as in URLs
    outside = [path for path in paths if path.startswith("/") or "://" in path]
    if outside:
        return [], f"Its file {outside[0]} is in another folder."
    return paths, ""
