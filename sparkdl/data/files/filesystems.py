"""Opens the filesystem of a URL, so that the URL means the same place for Spark and for Python.

Runs on the *driver* and on every *rank*. fsspec opens the filesystem; credentials come from the environment,
where fsspec's plugins and Spark look for them.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from sparkdl.errors import ParamError, StoreError
from sparkdl.foreign_errors import explain_failure, how_to_install

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_logger = logging.getLogger(__name__)

_NEEDED = {
    "s3": how_to_install("s3", "s3fs"),
    "s3a": how_to_install("s3", "s3fs"),
    "gs": how_to_install("gcs", "gcsfs"),
    "gcs": how_to_install("gcs", "gcsfs"),
    "abfs": how_to_install("azure", "adlfs"),
    "abfss": how_to_install("azure", "adlfs"),
    "az": how_to_install("azure", "adlfs"),
    "hdfs": "Install pyarrow and the Hadoop client (libhdfs), and set JAVA_HOME, HADOOP_HOME and CLASSPATH (to what "
    "`hadoop classpath --glob` prints).",
    "oci": "Install ocifs.",
}
"""What to install, and set, to open URLs of a scheme."""

_WITHOUT_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci"})
"""Schemes of object stores."""

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Location:
    """The place that a URL points to.

    Attributes:
        filesystem: the fsspec filesystem.
        path: the path on that filesystem, without a slash at the end.
        spark_url: URL of the same place for Spark.
        is_local: whether Python sees it as a plain path (local disks, network mounts, ``/dbfs``,
            ``/Volumes``).
        has_folders: whether a folder is made before its files. Object stores have no folders, and would make a bucket
            from a mistyped name.
        can_rename: whether renaming a folder is one cheap operation; object stores, and other filesystems whose class
            does not define ``mv``, copy every file instead.
    """

    filesystem: Any
    path: str
    spark_url: str
    is_local: bool
    has_folders: bool
    can_rename: bool

    def open_file(self, path: str) -> Any:
        """Open a file of this filesystem for reading by pyarrow."""
        import pyarrow as pa

        return pa.OSFile(path, "rb") if self.is_local else self.filesystem.open(path, "rb")

    def name_of(self, path: str) -> str:
        """Return a path of this filesystem as users know it: with its scheme, unless the filesystem is local."""
        return path if self.is_local else str(self.filesystem.unstrip_protocol(path))

    def make_folder(self) -> None:
        """Make this folder and its parents, if the filesystem has folders."""
        if self.has_folders:
            self.filesystem.makedirs(self.path, exist_ok=True)

    def write_whole(self, name: str, content: bytes, *, writer: str = "") -> None:
        """Write a file of this folder so that a reader sees either all of it or the previous file.

        Args:
            name: name of the file inside the folder.
            content: content of the file.
            writer: text that distinguishes this writer from others that may write the same file at the same time.
        """
        final = f"{self.path}/{name}"
        # Object stores show a file only when it is complete; on other filesystems renaming has the same effect.
        written = final if not self.can_rename else f"{final}.{writer}.tmp" if writer else f"{final}.tmp"
        self.filesystem.pipe_file(written, content)
        if written != final:
            self.rename(written, final)

    def put_folder(self, folder: Path, *, last: str = "") -> None:
        """Write a local folder to this place, where it replaces what is there; with ``last`` never a mix of both.

        Everything is written beside the destination first, and read back. Then it is renamed, or where folders cannot
        be renamed, written under its own names, ``last`` after all other files.

        Args:
            folder: local folder.
            last: path of the file inside the folder without which readers refuse the folder; empty for none.

        Raises:
            Exception: an error of the filesystem. What was there before is kept, unless an object store failed after
                the new files were complete beside it: the log then says where they are.
        """
        token = uuid.uuid4().hex[:8]
        self.filesystem.invalidate_cache()
        if self.can_rename:
            self._replace_by_rename(folder, token)
        elif self.filesystem.exists(self.path):
            self._replace_files(folder, f"{self.path}/.{token}.new", last)
        else:
            try:
                self._upload(folder, self.path, last)
            except BaseException:  # Ctrl-C as well
                self._remove_quietly(self.path)
                raise

    def _replace_by_rename(self, folder: Path, token: str) -> None:
        parent, _, name = self.path.rpartition("/")
        aside, old = f"{parent}/.{name}-{token}.new", f"{parent}/.{name}-{token}.old"
        try:
            self._upload(folder, aside)
            if self.filesystem.exists(self.path):
                self.rename(self.path, old)
            self.rename(aside, self.path)
        except BaseException:  # Ctrl-C as well
            if self.filesystem.exists(old):
                self._remove_quietly(self.path)
                self.rename(old, self.path)
            self._remove_quietly(aside)
            raise
        self._remove_quietly(old)

    def _replace_files(self, folder: Path, aside: str, last: str) -> None:
        try:
            self._upload(folder, aside, last)
        except BaseException:  # Ctrl-C as well
            self._remove_quietly(aside)
            raise
        try:
            old = [path for path in self.find_files() if not path.startswith(f"{aside}/")]
            final = f"{self.path}/{last}"
            for path in sorted(old, key=lambda path: path != final):  # the file that makes it complete first
                self.filesystem.rm_file(path)
            self._upload(folder, self.path, last)
        except BaseException:
            _logger.warning(
                "%s is not complete. All of its new files are in %s.", self.name_of(self.path), aside
            )
            raise
        self._remove_quietly(aside)

    def _upload(self, folder: Path, path: str, last: str = "") -> None:
        """Write the files of a local folder below a path, ``last`` after all others, and compare sizes in between."""
        sizes = {
            file.relative_to(folder).as_posix(): file.stat().st_size
            for file in folder.rglob("*")
            if file.is_file()
        }
        for name in sorted(sizes, key=lambda name: (name == last, name)):
            if name == last:
                self._check_sizes(path, {name: size for name, size in sizes.items() if name != last})
            if self.has_folders:
                self.filesystem.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
            with (folder / name).open("rb") as source, self.filesystem.open(f"{path}/{name}", "wb") as file:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
        self._check_sizes(path, sizes)

    def _check_sizes(self, path: str, sizes: Mapping[str, int]) -> None:
        self.filesystem.invalidate_cache()
        for name, size in sizes.items():
            actual = self.filesystem.info(f"{path}/{name}")["size"]
            if actual != size:
                raise OSError(f"{self.name_of(path)}/{name} has {actual} bytes, and {size} were written")

    def fetch_folder(self, folder: Path) -> None:
        """Copy all files of this place into a local folder."""
        for path in self.find_files():
            local = folder / path[len(self.path) + 1 :]
            local.parent.mkdir(parents=True, exist_ok=True)
            self.filesystem.get_file(path, str(local))

    def find_files(self) -> list[str]:
        """Return the paths of all files below this folder, sorted, or of this file; as Spark, also those behind links.

        fsspec leaves out what is behind a link to a local folder, and local folders that may not be listed.

        Raises:
            OSError: if a folder cannot be listed. A folder that does not exist has no files.
        """
        self.filesystem.invalidate_cache()  # fsspec's cached listings lack what Spark has written since
        if not self.is_local:
            # Some tools mark the folders of an object store by files whose names end with a slash.
            return [str(path) for path in self.filesystem.find(self.path) if not str(path).endswith("/")]
        if os.path.isfile(self.path):
            return [self.path]
        return sorted(_files_below(self.path, frozenset()))

    def rename(self, path: str, to: str) -> None:
        """Rename a file or folder of this filesystem."""
        if self.is_local:
            os.replace(path, to)
        else:
            self.filesystem.mv(path, to)

    def _remove_quietly(self, path: str) -> None:
        try:
            self.filesystem.invalidate_cache()
            if self.filesystem.exists(path):
                self.filesystem.rm(path, recursive=True)
        except Exception as error:
            _logger.warning("%s is no longer needed, and could not be removed: %s", self.name_of(path), error)


def _files_below(folder: str, above: frozenset[str]) -> Iterator[str]:
    """Yield the files below a local folder; ``above`` has the real paths of the folders that lead to it."""
    real = os.path.realpath(folder)
    if real in above:
        raise OSError(errno.ELOOP, "A symbolic link leads back to a folder above it", folder)
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir():
            yield from _files_below(entry.path, above | {real})
        else:
            yield entry.path


def open_location(url: str) -> Location:
    """Open the filesystem that a URL or path lies on.

    Args:
        url: a local path, or a URL of any scheme that fsspec knows: ``file:``, ``dbfs:/``, ``s3://``,
            ``abfss://``, ``gs://``, ``hdfs://``.

    Raises:
        StoreError: if the scheme is unknown, its plugin is not installed, or the filesystem cannot be
            reached.
        ParamError: if the URL is empty.
    """
    url = _with_single_slashes(url)
    local = _as_local_path(url)
    if local is not None:
        return Location(
            filesystem=LocalFileSystem(),
            path=local,
            spark_url=_spark_url_of_local_path(local),
            is_local=True,
            has_folders=True,
            can_rename=True,
        )
    scheme = url.split(":", 1)[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except Exception as error:
        raise StoreError(f"{url} cannot be opened: {_why_not(scheme, error)}") from error
    return Location(
        filesystem=filesystem,
        path=str(path).rstrip("/"),
        # Apache Spark's S3 client accepts only s3a://; Databricks and EMR accept it too.
        spark_url="s3a://" + url[len("s3://") :] if scheme == "s3" else url,
        is_local=False,
        has_folders=scheme not in _WITHOUT_FOLDERS,
        can_rename=scheme not in _WITHOUT_FOLDERS and type(filesystem).mv is not AbstractFileSystem.mv,
    )


def _why_not(scheme: str, error: Exception) -> str:
    # The message of libhdfs lists every place where it looked for Java, one per line.
    what = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    is_missing = isinstance(error, ImportError) or what.startswith("Protocol not known")
    if is_missing or scheme == "hdfs":
        return f"{what}. {_NEEDED.get(scheme, f'Fix the URL, or install the plugin of fsspec for {scheme}.')}"
    return explain_failure(
        error, "See whether the URL is complete, and what its plugin needs is set in the environment."
    )


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Return the URL with relative local paths made absolute, ``~`` expanded and no slash at the end.

    Raises:
        ParamError: if it is empty.
    """
    if not os.fspath(url).strip():
        raise ParamError("The path of a folder is empty. Give a path or a URL; the current folder is '.'.")
    text = _with_single_slashes(os.fspath(url)).rstrip("/") or "/"
    return text if _has_scheme(text) else str(Path(text).expanduser().absolute())


def local_path(path: str) -> Path:
    """Return the local path that a path or URL leads to.

    Raises:
        ParamError: if it does not lead to a local filesystem.
    """
    local = _as_local_path(path)
    if local is None:
        raise ParamError(f"{path} is not on a local filesystem. Give a local path.")
    return Path(local)


def _with_single_slashes(url: str) -> str:
    """Return a URL without empty parts of its path: Hadoop leaves them out, and object stores do not."""
    if "::" in url:  # of fsspec, a chain of URLs
        return url
    scheme, separator, rest = url.rpartition("://")
    authority, slash, path = rest.partition("/") if separator else ("", "", rest)
    return (
        f"{scheme}{separator}{authority}{slash}{re.sub('/{2,}', '/', path).lstrip('/' if separator else '')}"
    )


def _has_scheme(text: str) -> bool:
    scheme, colon, _ = text.partition(":")
    return bool(colon) and len(scheme) > 1 and scheme.replace("+", "").replace("-", "").isalnum()


def _as_local_path(url: str) -> str | None:
    if not _has_scheme(url):
        return absolute_url(url)
    scheme, _, rest = url.partition(":")
    path = "/" + rest.lstrip("/").rstrip("/")
    if scheme == "file":
        return path  # as it stands, without decoding %20: so Hadoop's Path takes it
    if scheme == "dbfs":  # Databricks mounts it for Python; Unity Catalog volumes stand at the root
        return path if path.startswith("/Volumes/") else "/dbfs" + path
    return None


def _spark_url_of_local_path(path: str) -> str:
    if path.startswith("/dbfs/"):
        return "dbfs:" + path[len("/dbfs") :]
    if path.startswith("/Volumes/"):
        return "dbfs:" + path
    # The scheme is explicit, as Spark's default filesystem may be another. Nothing is quoted: Hadoop takes a path as
    # it is written, and would make a folder named %20.
    return f"file://{path}"
