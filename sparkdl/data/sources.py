"""From what a feed is given to a dataset: a described one, the URL of a folder, or a Store that holds one.

Runs wherever the feed is made, on the *driver* or on a *rank*.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sparkdl.data.dataset import MANIFEST_NAME, Column, ParquetDataset
from sparkdl.data.filesystems import open_location
from sparkdl.data.footers import scan_dataset
from sparkdl.data.manifest import open_dataset
from sparkdl.data.store import Store
from sparkdl.errors import DataError, ParamError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Source: TypeAlias = "ParquetDataset | Store | str | os.PathLike[str]"


def find_dataset(
    source: Source,
    columns: Sequence[str] | None,
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
) -> ParquetDataset:
    """Return the dataset that a source stands for.

    Args:
        source: a dataset; the URL or path of a folder of Parquet files, of a dataset in a Store, or of a dataset
            that Petastorm wrote with a Unischema; or a Store that holds exactly one dataset.
        columns: the columns that matter, by default all.
        shapes: of array columns in a folder of plain Parquet; see :func:`sparkdl.data.scan_dataset`.

    Raises:
        DataError: if there are no Parquet files, they cannot be read, or a Store holds none or several datasets.
        ParamError: if shapes are given for a dataset that tells those of its columns itself.
        StoreError: if the filesystem cannot be opened.
    """
    described = _described_dataset(source)
    if described is None:
        return scan_dataset(os.fspath(cast("str | os.PathLike[str]", source)), columns, shapes)
    if shapes is not None:
        raise ParamError(
            f"shapes={shapes!r} is for folders of plain Parquet files; this dataset tells the shapes of its columns: "
            f"{', '.join(_shape_of(column) for column in described.columns)}. Leave shapes out."
        )
    return described


def _described_dataset(source: Any) -> ParquetDataset | None:
    """Return the dataset that a source describes, or None for a folder of plain Parquet files."""
    if isinstance(source, ParquetDataset):
        return source
    if isinstance(source, Store):
        return open_dataset(_only_dataset(source))
    url = os.fspath(source)
    location = open_location(url)
    if location.filesystem.exists(f"{location.path}/{MANIFEST_NAME}"):
        return open_dataset(url)
    if location.filesystem.exists(f"{location.path}/_common_metadata"):
        from sparkdl.data.petastorm.unischema_dataset import find_unischema_dataset

        return find_unischema_dataset(url)
    return None


def _shape_of(column: Column) -> str:
    return f"{column.name} {column.lengths or column.shape}"


def _only_dataset(store: Store) -> str:
    location = store.location
    manifests = sorted(location.filesystem.glob(f"{location.path}/*/{MANIFEST_NAME}"))
    names = [str(path).split("/")[-2] for path in manifests]
    if len(names) != 1:
        found = f"holds {len(names)} datasets ({', '.join(names[:5])})" if names else "holds no dataset"
        raise DataError(
            f"The Store {store.url} {found}; a feed reads one. Give it the dataset that materialize() or "
            "open_dataset() returned, or its URL."
        )
    return f"{store.url}/{names[0]}"
