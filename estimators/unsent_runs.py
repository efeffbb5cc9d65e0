"""Where a Store keeps what MLflow did not take: ``unsent-runs``, beside its datasets. Runs on the *driver*."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.data.files.failures import explain_failure, store_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.data import Store

FOLDER = "unsent-runs"


class UnsentRuns:
    """Folders of a Store; a :class:`sparkdl.tracking.Shelf`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._location = store.location
        self._path = f"{self._location.path}/{FOLDER}"

    def put(self, name: str, folders: Mapping[str, Path], files: Mapping[str, bytes]) -> str:
        """Copy local folders and then files into a folder of the Store, and return its URL.

        Raises:
            StoreError: if the Store cannot be written.
        """
        filesystem, path = self._location.filesystem, f"{self._path}/{name}"
        try:
            filesystem.makedirs(path, exist_ok=True)
            for each, folder in folders.items():
                filesystem.put(f"{folder}/", f"{path}/{each}/", recursive=True)
            for each, content in files.items():
                self._write(f"{path}/{each}", content)
        except Exception as error:
            raise self._store.cannot_be_written(error) from error
        return f"{self._store.url}/{FOLDER}/{name}"

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
            return sorted(Path(each).name for each in filesystem.ls(self._path, detail=False))
        except Exception as error:
            raise store_error(f"{self._path} cannot be listed: {explain_failure(error)}") from error

    def holds(self, name: str, file: str) -> bool:
        """Return whether a folder has a file.

        Raises:
            StoreError: if the Store cannot be read.
        """
        try:
            return bool(self._location.filesystem.exists(f"{self._path}/{name}/{file}"))
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be read: {explain_failure(error)}") from error

    def get(self, name: str, into: Path) -> None:
        """Copy a folder to a local one that exists.

        Raises:
            StoreError: if it cannot be read.
        """
        try:
            self._location.filesystem.get(f"{self._path}/{name}/", f"{into}/", recursive=True)
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be read: {explain_failure(error)}") from error

    def remove(self, name: str) -> None:
        """Remove a folder, and the one around it with the last.

        Raises:
            StoreError: if it cannot be removed.
        """
        filesystem = self._location.filesystem
        try:
            filesystem.rm(f"{self._path}/{name}", recursive=True)
            filesystem.invalidate_cache()
            if filesystem.exists(self._path) and not filesystem.ls(self._path, detail=False):
                filesystem.rm(self._path, recursive=True)
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be removed: {explain_failure(error)}") from error

    def _write(self, path: str, content: bytes) -> None:
        # Object stores show a file when it is complete; elsewhere renaming makes it so.
        written = f"{path}.{uuid.uuid4().hex[:8]}.tmp" if self._location.can_rename else path
        with self._location.filesystem.open(written, "wb") as file:
            file.write(content)
        if written != path:
            self._location.filesystem.mv(written, path)
