"""Which files below a folder are Parquet, and what to say where there are none.

Runs on the *driver*, and wherever a feed is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdl.data.store_failures import reading_from
from sparkdl.errors import DataError, EmptyDatasetError

if TYPE_CHECKING:
    from sparkdl.data.filesystems import Location

_SUFFIX = ".parquet"
_NUM_NAMED = 3


def find_parquet_files(location: Location, url: str) -> list[str]:
    """Return what :func:`list_parquet_files` does, and at least one file.

    Args:
        location: the folder.
        url: the folder as the user spells it.

    Raises:
        DataError: if there are none; it says whether there is such a folder at all, and what it holds instead.
        StoreAccessError: if the filesystem does not tell.
    """
    with reading_from(url):
        found = list_parquet_files(location)
        if not found:
            raise _none_found(location, url)
    return found


def list_parquet_files(location: Location) -> list[str]:
    """Return the paths of the data files below a folder, relative to it and sorted."""
    location.filesystem.invalidate_cache()  # Spark writes behind the back of fsspec's listings
    return sorted(path for path in _paths_below(location) if path.endswith(_SUFFIX) and not _is_private(path))


def _paths_below(location: Location) -> list[str]:
    # Of a file, fsspec finds the file itself, whose path inside the folder is empty.
    relative = (
        str(path)[len(location.path) :].lstrip("/") for path in location.filesystem.find(location.path)
    )
    return sorted(path for path in relative if path)


def _is_private(path: str) -> bool:
    return any(part.startswith(("_", ".")) for part in path.split("/"))


def _none_found(location: Location, url: str) -> DataError:
    filesystem: Any = location.filesystem
    if "*" in url:
        return DataError(
            f"{url} is a pattern, and a folder is needed. Give the folder of the files; for some of its files, "
            "scan_dataset(folder, paths=[...])."
        )
    if not filesystem.exists(location.path):
        # Object stores have no folders: one without files does not exist.
        return EmptyDatasetError(
            f"There is nothing at {url}. Mend the path, or wait until the files are there."
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
