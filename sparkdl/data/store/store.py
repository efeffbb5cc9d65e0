"""The Store: a location for files that the driver and every executor can reach.

The manifest of a dataset is one JSON file that describes the folder. Reading it is enough to plan shards; no footer
is opened again.

Each dataset is written to a folder of its own, which is not read before its manifest exists: the manifest is written
last, in one operation. A dataset that could not be finished leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from sparkdl.checks import check_format
from sparkdl.data.dataset.dataset import MANIFEST_NAME, Column, ParquetDataset, RowGroup
from sparkdl.data.files.filesystems import Location, absolute_url, open_location
from sparkdl.data.files.lease import Lease
from sparkdl.data.store.housekeeping import LAST_USE, USE, Marks, remove_folder, remove_old_folders
from sparkdl.errors import ParamError, StoreError
from sparkdl.foreign_errors import (
    describe_lasting_failure,
    errors_as,
    reading_from,
    store_error,
    store_errors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


_FORMAT = 1


def write_manifest(dataset: ParquetDataset, location: Location) -> None:
    """Write the manifest of a dataset into the folder at ``location``."""
    files = list(dict.fromkeys(row_group.path for row_group in dataset.row_groups))
    position = {path: index for index, path in enumerate(files)}
    content = {
        "format": _FORMAT,
        "num_rows": dataset.num_rows,
        "columns": [asdict(column) for column in dataset.columns],
        "files": files,
        "row_groups": [[position[group.path], group.index, group.num_rows] for group in dataset.row_groups],
    }
    location.write_whole(MANIFEST_NAME, json.dumps(content).encode())


def open_dataset(url: str) -> ParquetDataset:
    """Return the dataset that a Store keeps at ``url``.

    Raises:
        StoreAccessError: if the Store cannot be read.
        StoreError: if there is no complete dataset there, or its manifest cannot be read or has a newer format.
    """
    location = open_location(url)
    with reading_from(url):
        text = _read_manifest(location, url)
    with errors_as(StoreError, f"The manifest of {url} cannot be read"):
        content = json.loads(text)
        check_format(f"The manifest of {url}", content, _FORMAT, StoreError)
    files = content["files"]
    return ParquetDataset(
        url=absolute_url(url),
        columns=tuple(_column(fields) for fields in content["columns"]),
        row_groups=tuple(
            RowGroup(path=files[position], index=index, num_rows=num_rows)
            for position, index, num_rows in content["row_groups"]
        ),
    )


def _column(fields: dict[str, Any]) -> Column:
    # JSON has lists for tuples.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Column(**values)


def _read_manifest(location: Location, url: str) -> bytes:
    try:
        content: bytes = location.filesystem.cat_file(f"{location.path}/{MANIFEST_NAME}")
    except FileNotFoundError as error:
        if describe_lasting_failure(error):  # the whole bucket is missing
            raise
        raise StoreError(f"{url} holds no complete dataset: there is no {MANIFEST_NAME}.") from error
    return content


KEEP_FOR = timedelta(days=1)
"""Default time that a dataset stays in a Store after its last use."""


class Store:
    """A folder for datasets, given by a local path or URL.

    Args:
        url: local or shared path, ``file:``, ``dbfs:/...``, ``/Volumes/...``, ``s3://``, ``abfss://``,
            ``gs://``, ``hdfs://``, or any other scheme that fsspec has a plugin for. Empty parts of the path are left
            out: ``s3://bucket//a`` is ``s3://bucket/a``, as for Hadoop.
        keep_for: time that a dataset stays after its last use, so that the same rows need not be written again; a day
            by default, no time with ``timedelta(0)``. Older datasets are removed when the next dataset is written, or
            by :meth:`cleanup`.

    Raises:
        ParamError: if the URL is empty, or ``keep_for`` negative or no ``timedelta``.
        StoreError: on first use, if the scheme is unknown or its plugin is not installed.
    """

    def __init__(self, url: str | os.PathLike[str], *, keep_for: timedelta = KEEP_FOR) -> None:
        if not isinstance(url, (str, os.PathLike)):
            raise ParamError(f"A Store takes a path or a URL, got {type(url).__name__}.")
        _check_duration("keep_for", keep_for)
        self.url = absolute_url(url)
        self.keep_for = keep_for

    def __repr__(self) -> str:
        return f"Store({self.url!r}, keep_for={self.keep_for!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Filesystems hold sockets and caches that cannot be pickled.
        return partial(Store, keep_for=self.keep_for), (self.url,)

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

    def check_writable(self) -> None:
        """Write, read and remove a small file, so that an unusable Store is detected before any work.

        Raises:
            StoreError: if that fails.
        """
        probe = f"{self.location.path}/probe-{uuid.uuid4().hex}.tmp"
        try:
            self.location.make_folder()
            self.location.filesystem.pipe_file(probe, b"sparkdl")
            content = self.location.filesystem.cat_file(probe)
            self.location.filesystem.rm(probe)
        except Exception as error:
            with suppress(Exception):
                self.location.filesystem.rm(probe)
            raise self.cannot_be_written(error) from error
        if content != b"sparkdl":
            raise StoreError(
                f"The Store {self.url} returns other bytes than were written to it. Check its filesystem, or set "
                "another Store."
            )

    def cannot_be_written(self, error: BaseException) -> StoreError:
        """Return the error for a Store that cannot be written."""
        if isinstance(error, StoreError):
            return error
        return store_error(
            f"The Store {self.url} cannot be written",
            error,
            "Choose a URL that the driver and every executor can write.",
        )

    @contextmanager
    def stage_dataset(self, name: str) -> Iterator[StagedDataset]:
        """Yield a new folder to write a dataset into; it is removed unless the dataset is committed.

        Args:
            name: first part of the folder's name.

        Raises:
            StoreError: if the Store cannot be written.
        """
        self.check_writable()
        staged = StagedDataset(f"{self.url}/{name}-{uuid.uuid4().hex}")
        try:
            yield staged
        finally:
            staged.discard()

    @contextmanager
    def scratch_folder(self, name: str) -> Iterator[str]:
        """Yield the URL of a new folder for temporary files; it is removed when the block ends.

        Raises:
            StoreError: if the Store cannot be written.
        """
        with self.stage_dataset(name) as staged:
            yield staged.url

    def cleanup(self, older_than: timedelta | None = None) -> list[str]:
        """Remove datasets that were not used for some time, and the remains of interrupted writes.

        Folders that are being read or written stay, however old they are; so do folders that sparkdl did not write.

        Args:
            older_than: time since the last use; by default ``keep_for``.

        Returns:
            The URLs of the removed folders.

        Raises:
            ParamError: if ``older_than`` is negative or no ``timedelta``.
            StoreError: if the Store cannot be listed, or something in it cannot be removed.
        """
        if older_than is not None:
            _check_duration("older_than", older_than)
        return remove_old_folders(
            self.url, (self.keep_for if older_than is None else older_than).total_seconds()
        )


class StagedDataset:
    """A dataset that is being written and cannot be read yet.

    Attributes:
        url: URL of the folder of its files.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._use: Lease | None = use_dataset(url)
        self._committed = False

    def commit(self, dataset: ParquetDataset) -> ParquetDataset:
        """Write the manifest, which makes the dataset visible, and return the dataset.

        Raises:
            StoreError: if that fails.
        """
        final = replace(dataset, url=self.url)
        with store_errors(f"The dataset {self.url} cannot be committed"):
            write_manifest(final, open_location(self.url))
        self._committed = True
        return final

    def hand_over_use(self) -> Lease:
        """Return the use under which the dataset was written; the caller closes it."""
        use, self._use = self._use, None
        assert use is not None, "a use is handed over once"
        return use

    def discard(self) -> None:
        """Remove the files unless they were committed."""
        if self._use is not None:
            self._use.close()
        if self._committed:
            return
        try:
            remove_folder(open_location(self.url))
        except Exception as error:  # not raised, as it would hide why the dataset was discarded
            logger.warning("The unfinished dataset %s could not be removed: %s", self.url, error)


def use_dataset(url: str) -> Lease:
    """Protect a folder of a Store from cleanup until the returned use ends.

    Raises:
        StoreError: if the Store cannot be written.
    """
    with store_errors(f"{url} cannot be written"):
        return Lease(open_location(url), USE, last_use=LAST_USE)


def reopen_dataset(url: str) -> tuple[ParquetDataset, Lease] | None:
    """Return a dataset of a Store and a use of it that the caller closes; None if it was removed, or is being removed.

    Raises:
        StoreError: if the Store cannot be read or written.
    """
    location = open_location(url)
    if not Marks(location).has_manifest:
        return None
    use = use_dataset(url)
    # Checked again, now that a cleanup sees this use.
    marks = Marks(location)
    try:
        if marks.has_manifest and not marks.is_being_removed:
            return open_dataset(url), use
    except StoreError as error:
        logger.warning("%s is not used: %s", url, error)
    use.close()
    return None


def use_if_removable(url: str) -> Lease | None:
    """Protect a folder as :func:`use_dataset` does if it is a dataset of a Store; return None for other folders.

    Raises:
        StoreError: if it is a dataset that was just removed, or its Store cannot be written.
    """
    location = open_location(url)
    if not Marks(location).has_manifest:
        return None
    use = use_dataset(url)
    # Checked again, now that a cleanup sees this use.
    marks = Marks(location)
    if marks.has_manifest and not marks.is_being_removed:
        return use
    use.close()
    raise StoreError(f"The dataset {url} was removed while it was being opened. Create the DataFrame again.")


def as_store(store: Store | str | os.PathLike[str]) -> Store:
    """Return a Store as it is, or the Store at a path or URL.

    Raises:
        ParamError: if it is something else.
    """
    return store if isinstance(store, Store) else Store(store)


def _check_duration(name: str, value: timedelta) -> None:
    if not isinstance(value, timedelta):
        raise ParamError(
            f"{name} must be a datetime.timedelta, got {value!r}; timedelta(seconds=5) are five seconds."
        )
    if value < timedelta(0):
        raise ParamError(f"{name} must not be negative, got {value}.")
