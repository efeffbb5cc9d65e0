"""The Store: a place for files that the driver and every executor can reach. Runs on the *driver*.

Datasets are written aside, in a folder ``NAME.tmp``, and become visible in one go; a dataset without its
manifest is never read, and one that could not be finished leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sparkdl.data.filesystems import Location, absolute_url, open_location
from sparkdl.data.manifest import write_manifest
from sparkdl.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparkdl.data.dataset import ParquetDataset

logger = logging.getLogger(__name__)


class Store:
    """A folder for datasets, given by a local path or URL.

    Args:
        url: local or shared path, ``file:``, ``dbfs:/...``, ``/Volumes/...``, ``s3://``, ``abfss://``,
            ``gs://``, ``hdfs://``, or any other scheme that fsspec has a plugin for.

    Raises:
        StoreError: on first use, if the scheme is unknown or its plugin is not installed.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = absolute_url(url)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return Store, (self.url,)  # filesystems hold sockets and caches that do not travel

    @classmethod
    def from_url(cls, url: str | os.PathLike[str]) -> Store:
        """Return the Store at a URL."""
        return cls(url)

    @classmethod
    def default(cls) -> Store:
        """Return the Store named by ``$SPARKDL_STORE``, or else the user's cache folder on this machine.

        The cache folder suits Spark on one machine, or home folders that all machines share.
        """
        configured = os.environ.get("SPARKDL_STORE")
        if configured:
            return cls(configured)
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls(os.path.join(cache, "sparkdl"))

    @cached_property
    def location(self) -> Location:
        """Filesystem, path and Spark's URL of this Store."""
        return open_location(self.url)

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem that the Store lies on."""
        return self.location.filesystem

    def check_writable(self) -> None:
        """Write, read and remove a small file, so that an unusable Store is known before any work.

        Raises:
            StoreError: if that fails.
        """
        probe = f"{self.location.path}/probe-{uuid.uuid4().hex}.tmp"
        try:
            self.filesystem.makedirs(self.location.path, exist_ok=True)
            with self.filesystem.open(probe, "wb") as file:
                file.write(b"sparkdl")
            with self.filesystem.open(probe, "rb") as file:
                content = file.read()
            self.filesystem.rm(probe)
        except Exception as error:
            with suppress(Exception):
                self.filesystem.rm(probe)
            raise StoreError(
                f"The Store {self.url} cannot be written: {type(error).__name__}: {error}. Choose a URL that "
                "the driver and every executor can write."
            ) from error
        if content != b"sparkdl":
            raise StoreError(f"The Store {self.url} does not give back what was written to it.")

    def new_dataset_url(self, name: str) -> str:
        """Return the URL of a folder that does not exist yet; ``name`` is the readable part of its name."""
        return f"{self.url}/{_as_file_name(name)}-{uuid.uuid4().hex[:16]}"

    @contextmanager
    def stage_dataset(self, name: str) -> Iterator[StagedDataset]:
        """Give a new folder to write a dataset into; it is removed unless it was committed.

        Raises:
            StoreError: if the Store cannot be written.
        """
        self.check_writable()
        staged = StagedDataset(self, self.new_dataset_url(name))
        try:
            yield staged
        finally:
            staged.discard()


class StagedDataset:
    """A dataset that is being written and that nobody reads yet.

    Attributes:
        url: where its files go now.
    """

    def __init__(self, store: Store, final_url: str) -> None:
        self._final_url = final_url
        # Object stores rename by copying every byte; there the manifest alone makes the set visible.
        self.url = f"{final_url}.tmp" if store.location.can_rename else final_url
        self._committed = False

    @property
    def spark_url(self) -> str:
        """Where Spark writes the files."""
        return open_location(self.url).spark_url

    def commit(self, dataset: ParquetDataset) -> ParquetDataset:
        """Write the manifest, move the folder to its place and return the dataset as it lies there.

        Raises:
            StoreError: if that fails.
        """
        here, there = open_location(self.url), open_location(self._final_url)
        final = replace(dataset, url=self._final_url)
        try:
            write_manifest(final, here)
            if here.path != there.path:
                here.filesystem.mv(here.path, there.path, recursive=True)
        except Exception as error:
            raise StoreError(f"The dataset {self._final_url} cannot be committed: {error}") from error
        self._committed = True
        return final

    def discard(self) -> None:
        """Remove the files unless they were committed."""
        if self._committed:
            return
        here = open_location(self.url)
        try:
            here.filesystem.rm(here.path, recursive=True)
        except FileNotFoundError:
            return
        except Exception as error:  # not raised, as it would hide why the set was given up
            logger.warning("The unfinished dataset %s could not be removed: %s", self.url, error)


def _as_file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:40] or "dataset"
