"""Finds the dataset of a feed's source: a described dataset, the URL of a folder or file, or a Store that holds one.

Runs wherever the feed is made, on the *driver* or on a *rank*.
"""

from __future__ import annotations

import os
from concurrent.futures import wait
from typing import TYPE_CHECKING, TypeAlias

import pyarrow.parquet as pq

from sparkdl.data.dataset.dataset import MANIFEST_NAME, ParquetDataset
from sparkdl.data.dataset.footers import scan_dataset
from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.data.files.threads import DaemonThreads
from sparkdl.data.store.store import Store, open_dataset
from sparkdl.errors import DataError, ParamError
from sparkdl.foreign_errors import describe_lasting_failure, reading_from
from sparkdl.lazy import load_entry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkdl.data.files.filesystems import Location

_COMMON_METADATA = "_common_metadata"
_UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
"""Key under which Petastorm keeps its schema in that file, which other programs write, too."""

Source: TypeAlias = "ParquetDataset | Store | str | os.PathLike[str]"


def find_dataset(
    source: Source,
    columns: Sequence[str] | None,
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
    *,
    timeout_s: float | None = None,
) -> ParquetDataset:
    """Return the dataset of a source.

    Args:
        source: a dataset; the URL or path of a folder of Parquet files, of one such file, of a dataset in a Store, or
            of a dataset that Petastorm wrote with a Unischema; or a Store that holds exactly one dataset.
        columns: names of the columns to describe; by default all.
        shapes: shapes of array columns in plain Parquet files; see :func:`sparkdl.data.scan_dataset`.
        timeout_s: seconds for finding and describing the dataset; None for no limit.

    Raises:
        ParamError: if the source is something else, or shapes are given for a dataset that already has the shapes of
            its columns.
        DataError: if there are no Parquet files, they cannot be read, or a Store holds none or several datasets; or if
            the timeout expires.
        StoreAccessError: if the filesystem denies access.
        StoreError: if the filesystem cannot be opened.
    """
    if not isinstance(source, (ParquetDataset, Store, str, os.PathLike)):
        raise ParamError(
            f"The source must be a dataset, a Store, or the path or URL of a folder, got {type(source).__name__}. "
            "For some files of a folder, pass scan_dataset(folder, paths=[...])."
        )
    if timeout_s is None or isinstance(source, ParquetDataset):
        return _find(source, columns, shapes)
    thread = DaemonThreads(1, "sparkdl-finder")
    try:
        future = thread.submit(_find, source, columns, shapes)
        if not wait([future], timeout=timeout_s).done:
            name = source.url if isinstance(source, Store) else os.fspath(source)
            raise DataError(
                f"Finding out what {name} holds took longer than {timeout_s:g} s. See whether the Store can be "
                "reached, or raise read_timeout_s."
            )
        return future.result()
    finally:
        thread.stop()


def _find(
    source: Source,
    columns: Sequence[str] | None,
    shapes: Mapping[str, tuple[int | None, ...]] | None,
) -> ParquetDataset:
    if isinstance(source, ParquetDataset):
        described = source
    elif isinstance(source, Store):
        described = open_dataset(_only_dataset(source))
    else:
        url = os.fspath(source)
        location = open_location(url)
        with reading_from(url):
            filesystem = location.filesystem
            is_stored = filesystem.exists(f"{location.path}/{MANIFEST_NAME}")
            has_metadata = not is_stored and filesystem.exists(f"{location.path}/{_COMMON_METADATA}")
            # Spark also writes folders with such names.
            is_file = url.endswith(".parquet") and filesystem.isfile(location.path)
        if is_stored:
            described = open_dataset(url)
        elif has_metadata and (pickled_schema := _read_unischema(location)) is not None:
            guest = load_entry("a folder with a Unischema of Petastorm")  # imports pandas and Petastorm
            described = guest.open_unischema_dataset(url, pickled_schema)
        elif is_file:
            folder, name = os.path.split(absolute_url(url))
            return scan_dataset(folder, columns, shapes, paths=[name])
        else:
            return scan_dataset(url, columns, shapes)
    if shapes is not None:
        known = (f"{column.name} {column.lengths or column.shape}" for column in described.columns)
        raise ParamError(
            f"shapes={shapes!r} is for folders of plain Parquet files; this dataset already has shapes of its columns: "
            f"{', '.join(known)}. Leave shapes out."
        )
    return described


def _read_unischema(location: Location) -> bytes | None:
    """Return the pickled schema that Petastorm wrote into a folder; None if the folder is of another program."""
    path = f"{location.path}/{_COMMON_METADATA}"
    try:
        with location.open_file(path) as file:
            metadata = pq.read_metadata(file).metadata or {}
    except Exception as error:
        raise DataError(f"The Parquet file {location.name_of(path)} cannot be read: {error}") from error
    pickled_schema: bytes | None = metadata.get(_UNISCHEMA_KEY)
    return pickled_schema


def _only_dataset(store: Store) -> str:
    location = store.location
    with reading_from(store.url):
        location.filesystem.invalidate_cache()
        manifests = sorted(location.filesystem.glob(f"{location.path}/*/{MANIFEST_NAME}"))
        if not manifests:
            try:  # for the filesystem's error for a missing bucket: globbing does not distinguish it from an empty one
                location.filesystem.ls(location.path)
            except FileNotFoundError as error:
                if describe_lasting_failure(error):
                    raise
    names = [str(path).split("/")[-2] for path in manifests]
    if len(names) != 1:
        content = f"holds {len(names)} datasets ({', '.join(names[:5])})" if names else "holds no dataset"
        raise DataError(
            f"The Store {store.url} {content}; a feed reads one. Give it the dataset that materialize() or "
            "open_dataset() returned, or its URL."
        )
    return f"{store.url}/{names[0]}"
