"""The folder that holds the checkpoints of one fit, and the thread that writes and removes them.

The folder may be on any filesystem that a Store may be on. A checkpoint is complete once its manifest exists, which
rank 0 writes last. Only *rank 0* writes, except for the parts of a module that is divided among ranks; every *rank* and
the *driver* read.

Checkpoints are written on a thread while training continues, and checkpoints that are no longer kept are removed.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING

from sparkdl.data.files.filesystems import Location, absolute_url, open_location
from sparkdl.data.files.threads import DaemonThreads
from sparkdl.data.store.housekeeping import list_folders
from sparkdl.errors import CheckpointError, SparkdlError, StoreError
from sparkdl.meanings import explain_failure, store_error
from sparkdl.training.checkpoint.files import (
    MANIFEST,
    Content,
    DamagedFileError,
    Manifest,
    check_file,
    is_checkpoint_name,
    manifest_from_json,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from concurrent.futures import Future
    from typing import Any


logger = logging.getLogger(__name__)

_BEST = "best.json"


class CheckpointFolder:
    """The checkpoints at a URL.

    Args:
        url: local or shared path, or a URL that a Store accepts.

    Attributes:
        url: absolute URL of the folder.
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
            raise store_error(f"The checkpoints in {self.url} cannot be listed", error) from error

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            DamagedFileError: if there is no manifest, or it cannot be parsed.
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
            raise store_error(f"{url} cannot be read", error) from error

    def location(self, name: str) -> Location:
        """Return the location of a checkpoint's files."""
        return open_location(f"{self.url}/{name}")

    def check(self, name: str, manifest: Manifest) -> None:
        """Compare all files of a checkpoint with its manifest.

        Raises:
            DamagedFileError: if a file is missing or differs.
            StoreError: if the folder cannot be read.
        """
        try:
            for file, expected in manifest.files.items():
                check_file(self.location(name), file, expected)
            if manifest.is_divided:
                from sparkdl.parallel.checkpoint_files import check_sizes  # needed only for divided modules

                check_sizes(f"{self.url}/{name}")
        except CheckpointError as error:
            raise DamagedFileError(str(error)) from error
        except OSError as error:
            raise store_error(f"{self.url}/{name} cannot be read", error) from error

    def newest_first(self) -> Iterator[tuple[str, Manifest | DamagedFileError]]:
        """Yield names and manifests, the newest first; for a damaged checkpoint the error instead of its manifest."""
        for name in reversed(self.names()):
            try:
                yield name, self.manifest(name)
            except DamagedFileError as error:
                yield name, error

    def write(self, content: Content) -> str:
        """Write a checkpoint and return its name; it appears complete or not at all.

        Raises:
            StoreError: if the checkpoint cannot be written.
        """
        name = content.name or content.manifest.new_name()
        location = self.location(name)
        try:
            if content.parts is not None:
                content.parts.result(LAST_TIMEOUT_S)
            location.make_folder()
            files = {file: write_file(location, file, state) for file, state in content.states.items()}
            manifest = Manifest(**{**vars(content.manifest), "files": files})
            location.write_whole(MANIFEST, manifest.to_json().encode())
        except Exception as error:
            with suppress(Exception):
                self._location.filesystem.rm(location.path, recursive=True)
            if isinstance(error, SparkdlError):  # from writing the parts
                raise
            raise store_error(
                f"The checkpoint {self.url}/{name} cannot be written",
                error,
                "Choose a checkpointDir that the driver and every executor can write.",
            ) from error
        return name

    def mark_best(self, name: str) -> None:
        """Mark a checkpoint as the best one, in place of the previous best.

        Raises:
            StoreError: if the mark cannot be written.
        """
        try:
            self._location.write_whole(_BEST, f"{json.dumps({'checkpoint': name})}\n".encode())
        except Exception as error:
            raise store_error(
                f"{self.url}/{_BEST}, which names the best checkpoint, cannot be written", error
            ) from error

    def best(self) -> str | None:
        """Return the name of the best checkpoint, or None if none is marked.

        Raises:
            StoreError: if the mark cannot be read.
        """
        try:
            with self._location.filesystem.open(f"{self._location.path}/{_BEST}", "rb") as file:
                content: Any = json.loads(file.read())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise store_error(f"{self.url}/{_BEST} cannot be read", error) from error
        return str(content["checkpoint"]) if isinstance(content, dict) and "checkpoint" in content else None

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first; a failure is logged."""
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


EARLIER_TIMEOUT_S = 240.0
"""How long a checkpoint waits for the previous one: less than other ranks wait for rank 0 in a collective."""

LAST_TIMEOUT_S = 1800.0
"""How long the end of a fit waits for its last checkpoint."""

FAILURE_TIMEOUT_S = 1.0
"""How long a failed fit waits for a checkpoint that is still being written."""


class CheckpointWriter:
    """Writes one checkpoint at a time; the next one waits for it, so that at most two are in memory.

    Args:
        folder: folder to write to.
        num_kept: number of the newest checkpoints to keep, in addition to the best.
        damaged: names of checkpoints that cannot be read, which are removed once a new one is written.
    """

    def __init__(self, folder: CheckpointFolder, *, num_kept: int, damaged: Collection[str] = ()) -> None:
        self._folder = folder
        self._num_kept = num_kept
        self._damaged = set(damaged)
        self._threads = DaemonThreads(1, "sparkdl-checkpoints")
        self._writing: Future[None] | None = None

    def write(self, content: Content, *, is_best: bool = False) -> None:
        """Write a checkpoint on the thread.

        Args:
            content: content of the checkpoint, which must not change after this call.
            is_best: whether the checkpoint is kept until a better one is written.

        Raises:
            StoreError: if the previous checkpoint could not be written, or is still being written after four minutes.
        """
        self.wait(EARLIER_TIMEOUT_S)
        self._writing = self._threads.submit(self._write, content, is_best)

    def wait(self, timeout_s: float = LAST_TIMEOUT_S) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            StoreError: if it could not be written, or was not written in time.
        """
        if self._writing is None:
            return
        # A store's own timeout, which ends the writing, is a TimeoutError too.
        if wait([self._writing], timeout_s).not_done:
            raise StoreError(
                f"A checkpoint was still being written to {self._folder.url} after {timeout_s:g} s. Choose a "
                "checkpointDir on a faster store, or a larger checkpointEverySteps."
            )
        self._writing.result()
        self._writing = None

    def close(self, *, failed: bool) -> None:
        """Stop the thread; unless the fit has failed, wait for the last checkpoint first, as :meth:`wait` does."""
        try:
            if not failed:
                self.wait()
            elif self._writing is not None:
                with suppress(Exception):  # the error that made the fit fail is reported instead
                    self._writing.result(FAILURE_TIMEOUT_S)
        finally:
            self._threads.stop()

    def _write(self, content: Content, is_best: bool) -> None:
        name = self._folder.write(content)
        if is_best:
            self._folder.mark_best(name)
        try:
            self._remove_old(name)
        except SparkdlError as error:  # training does not depend on it
            logger.warning("Checkpoints that are no longer kept could not be removed: %s", error)

    def _remove_old(self, newest: str) -> None:
        found = list(self._folder.newest_first())
        whole = [
            name for name, manifest in found if isinstance(manifest, Manifest) and name not in self._damaged
        ]
        kept = {*whole[: self._num_kept], newest, self._folder.best()}
        for name, _ in found:
            if name not in kept:
                self._folder.remove(name)
        self._damaged.clear()
