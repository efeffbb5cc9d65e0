"""The folder that holds the checkpoints of one fit: which there are, which of them are whole, and which may go.

On any filesystem that a Store may lie on. A checkpoint is complete once its manifest lies there, which is written last.
Runs on *rank 0*, which alone writes, and to look at what there is on every *rank* and the *driver*.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from sparkdl.data.cleanup import list_folders
from sparkdl.data.filesystems import Location, absolute_url, open_location
from sparkdl.data.store_failures import explain_failure, store_error
from sparkdl.errors import SparkdlError, StoreError
from sparkdl.training.checkpoint import (
    FILES,
    MANIFEST,
    Content,
    Manifest,
    is_checkpoint_name,
    manifest_from_json,
)
from sparkdl.training.checkpoint_files import DamagedFileError, check_file, write_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

logger = logging.getLogger(__name__)

_BEST = "best.json"


class CheckpointFolder:
    """The checkpoints at a URL.

    Args:
        url: local or shared path, or a URL as a Store takes it.

    Attributes:
        url: likewise.
    """

    def __init__(self, url: str) -> None:
        self.url = absolute_url(url)
        self._location = open_location(self.url)

    def names(self) -> list[str]:
        """Return the names of all checkpoints, complete or not, in the order of the fit.

        Raises:
            StoreError: if the folder cannot be listed.
        """
        try:
            self._location.filesystem.invalidate_cache()
            if not self._location.filesystem.exists(self._location.path):
                return []
            return [name for name in list_folders(self._location) if is_checkpoint_name(name)]
        except Exception as error:
            raise StoreError(
                f"The checkpoints in {self.url} cannot be listed: {explain_failure(error)}"
            ) from error

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            DamagedFileError: if there is none, or it cannot be understood.
            CheckpointError: if a newer version of sparkdl wrote it.
            StoreError: if the folder cannot be read.
        """
        url = f"{self.url}/{name}"
        try:
            with self._location.filesystem.open(f"{self._location.path}/{name}/{MANIFEST}", "rb") as file:
                return manifest_from_json(file.read(), url)
        except FileNotFoundError:
            raise DamagedFileError("it was not written to its end") from None
        except ValueError as error:
            if isinstance(error, SparkdlError):
                raise
            raise DamagedFileError(f"its {MANIFEST} is damaged: {error}") from error
        except OSError as error:
            raise StoreError(f"{url} cannot be read: {explain_failure(error)}") from error

    def location(self, name: str) -> Location:
        """Return where the files of a checkpoint lie."""
        return open_location(f"{self.url}/{name}")

    def check(self, name: str, manifest: Manifest) -> None:
        """Compare all files of a checkpoint with its manifest.

        Raises:
            DamagedFileError: if one is missing or another one.
            StoreError: if the folder cannot be read.
        """
        try:
            for file in FILES:
                check_file(self.location(name), file, manifest.files[file])
        except OSError as error:
            raise StoreError(f"{self.url}/{name} cannot be read: {explain_failure(error)}") from error

    def newest_first(self) -> Iterator[tuple[str, Manifest | DamagedFileError]]:
        """Yield names and manifests, the newest checkpoint first; in the place of a manifest what is wrong with it."""
        for name in reversed(self.names()):
            try:
                yield name, self.manifest(name)
            except DamagedFileError as error:
                yield name, error

    def write(self, content: Content) -> str:
        """Write a checkpoint and return its name; it appears complete or not at all.

        Raises:
            StoreError: if that fails.
        """
        name = content.manifest.new_name()
        location = self.location(name)
        try:
            location.make_folder()
            files = {file: write_file(location, file, content.states[file]) for file in FILES}
            manifest = Manifest(**{**vars(content.manifest), "files": files})
            _commit(location, MANIFEST, manifest.to_json())
        except Exception as error:
            with suppress(Exception):
                self._location.filesystem.rm(location.path, recursive=True)
            why = explain_failure(
                error, "Choose a checkpointDir that the driver and every executor can write."
            )
            raise store_error(f"The checkpoint {self.url}/{name} cannot be written: {why}") from error
        return name

    def mark_best(self, name: str) -> None:
        """Have a checkpoint kept, in the place of the one that was the best before.

        Raises:
            StoreError: if that cannot be written.
        """
        try:
            _commit(self._location, _BEST, json.dumps({"checkpoint": name}) + "\n")
        except Exception as error:
            raise StoreError(
                f"{self.url}/{_BEST}, which names the best checkpoint, cannot be written: {explain_failure(error)}"
            ) from error

    def best(self) -> str | None:
        """Return the name of the best checkpoint, if one was marked.

        Raises:
            StoreError: if that cannot be read.
        """
        try:
            with self._location.filesystem.open(f"{self._location.path}/{_BEST}", "rb") as file:
                content: Any = json.loads(file.read())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise StoreError(f"{self.url}/{_BEST} cannot be read: {explain_failure(error)}") from error
        return str(content["checkpoint"]) if isinstance(content, dict) and "checkpoint" in content else None

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first; what cannot be removed is logged."""
        path = f"{self._location.path}/{name}"
        try:
            with suppress(FileNotFoundError):
                self._location.filesystem.rm(f"{path}/{MANIFEST}")
            with suppress(FileNotFoundError):
                self._location.filesystem.rm(path, recursive=True)
            self._location.filesystem.invalidate_cache()
        except Exception as error:  # training does not depend on it
            logger.warning(
                "The checkpoint %s/%s could not be removed: %s", self.url, name, explain_failure(error)
            )


def _commit(location: Location, name: str, text: str) -> None:
    final = f"{location.path}/{name}"
    # Object stores show a file when it is complete; elsewhere renaming makes it so.
    written = f"{final}.tmp" if location.can_rename else final
    with location.filesystem.open(written, "wb") as file:
        file.write(text.encode())
    if written != final:
        location.filesystem.mv(written, final)
