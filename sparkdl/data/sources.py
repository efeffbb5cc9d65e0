"""From what a feed is given to a dataset: a described one, the URL of a folder, or a Store that holds one.

Runs wherever the feed is made, on the *driver* or on a *rank*.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from sparkdl.data.dataset import MANIFEST_NAME, ParquetDataset
from sparkdl.data.filesystems import open_location
from sparkdl.data.footers import scan_dataset
from sparkdl.data.manifest import open_dataset
from sparkdl.data.store import Store
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

Source: TypeAlias = "ParquetDataset | Store | str | os.PathLike[str]"


def find_dataset(source: Source, columns: Sequence[str] | None) -> ParquetDataset:
    """Return the dataset that a source stands for.

    Args:
        source: a dataset; the URL or path of a folder of Parquet files, of a dataset in a Store, or of a dataset
            that Petastorm wrote with a Unischema; or a Store that holds exactly one dataset.
        columns: the columns that matter, by default all.

    Raises:
        DataError: if there are no Parquet files, they cannot be read, or a Store holds none or several datasets.
        StoreError: if the filesystem cannot be opened.
    """
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

        decoded = find_unischema_dataset(url)
        if decoded is not None:
            return decoded
    return scan_dataset(url, columns)


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
