"""The folder of a Store with what MLflow did not accept, beside the Store's datasets, to be sent later."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.data.files.filesystems import open_location
from sparkdl.foreign_errors import store_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.data import Store


FOLDER = "unsent-runs"


class UnsentRuns:
    """Folders of unsent runs in a Store; implements :class:`sparkdl.tracking.Shelf`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._location = store.location
        self._path = f"{self._location.path}/{FOLDER}"

    def put(self, name: str, folders: Mapping[str, Path], files: Mapping[str, bytes]) -> str:
        """Copy local folders and then files into a folder of the Store, and return its URL.

        Raises:
            StoreError: if the Store cannot be written.
        """
        url = f"{self._store.url}/{FOLDER}/{name}"
        try:
            there = open_location(url)
            there.make_folder()
            for file, folder in folders.items():
                open_location(f"{url}/{file}").put_folder(folder)
            for file, content in files.items():
                there.write_whole(file, content, writer=uuid.uuid4().hex[:8])
        except Exception as error:
            raise self._store.cannot_be_written(error) from error
        return url

    def names(self) -> list[str]:
        """Return the names of the folders, the oldest first.

        Raises:
            StoreError: if the Store cannot be read.
        """
        filesystem = self._location.filesystem
        try:
            filesystem.invalidate_cache()
            if not filesystem.exists(self._path):
                return []
            return sorted(Path(path).name for path in filesystem.ls(self._path, detail=False))
        except Exception as error:
            raise store_error(f"{self._path} cannot be listed", error) from error

    def holds(self, name: str, file: str) -> bool:
        """Return whether a folder has a file.

        Raises:
            StoreError: if the Store cannot be read.
        """
        try:
            return bool(self._location.filesystem.exists(f"{self._path}/{name}/{file}"))
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be read", error) from error

    def get(self, name: str, into: Path) -> None:
        """Copy a folder into an existing local folder.

        Raises:
            StoreError: if the folder cannot be read.
        """
        try:
            open_location(f"{self._store.url}/{FOLDER}/{name}").fetch_folder(into)
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be read", error) from error

    def remove(self, name: str) -> None:
        """Remove a folder; with the last one also its parent folder.

        Raises:
            StoreError: if the folder cannot be removed.
        """
        filesystem = self._location.filesystem
        try:
            filesystem.rm(f"{self._path}/{name}", recursive=True)
            filesystem.invalidate_cache()
            if filesystem.exists(self._path) and not filesystem.ls(self._path, detail=False):
                filesystem.rm(self._path, recursive=True)
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be removed", error) from error
