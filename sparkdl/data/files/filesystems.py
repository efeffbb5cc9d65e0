"""Opens the filesystem of a URL, so that the URL means the same place for Spark and for Python.

Runs on the *driver* and on every *rank*. fsspec opens the filesystem; credentials come from the environment,
where fsspec's plugins and Spark look for them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from sparkdl.data.files.failures import explain_failure
from sparkdl.errors import ParamError, StoreError

_NEEDED = {
    "s3": "Install s3fs.",
    "s3a": "Install s3fs.",
    "gs": "Install gcsfs.",
    "gcs": "Install gcsfs.",
    "abfs": "Install adlfs.",
    "abfss": "Install adlfs.",
    "az": "Install adlfs.",
    "hdfs": "Install pyarrow and the Hadoop client (libhdfs), and set JAVA_HOME, HADOOP_HOME and CLASSPATH (to what "
    "`hadoop classpath --glob` prints).",
    "oci": "Install ocifs.",
}
"""What to install, and set, to open URLs of a scheme."""

_WITHOUT_RENAME = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci"})


@dataclass(frozen=True)
class Location:
    """The place that a URL points to.

    Attributes:
        filesystem: the fsspec filesystem.
        path: the path on that filesystem, without a slash at the end.
        spark_url: URL of the same place for Spark.
        is_local: whether Python sees it as a plain path (local disks, network mounts, ``/dbfs``,
            ``/Volumes``).
        can_rename: whether renaming a folder is one cheap operation; object stores copy every file instead.
    """

    filesystem: Any
    path: str
    spark_url: str
    is_local: bool
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
        if self.can_rename:  # object stores have none, and would make a bucket from a mistyped name
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
        with self.filesystem.open(written, "wb") as file:
            file.write(content)
        if written != final:
            self.filesystem.mv(written, final)


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
    local = _as_local_path(url)
    if local is not None:
        return Location(
            filesystem=LocalFileSystem(),
            path=local,
            spark_url=_spark_url_of_local_path(local),
            is_local=True,
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
        can_rename=scheme not in _WITHOUT_RENAME,
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
    text = os.fspath(url).rstrip("/") or "/"
    return text if _has_scheme(text) else str(Path(text).expanduser().absolute())


def _has_scheme(text: str) -> bool:
    scheme, colon, _ = text.partition(":")
    return bool(colon) and len(scheme) > 1 and scheme.replace("+", "").replace("-", "").isalnum()


def _as_local_path(url: str) -> str | None:
    if not _has_scheme(url):
        return absolute_url(url)
    scheme, _, rest = url.partition(":")
    path = "/" + rest.lstrip("/").rstrip("/")
    if scheme == "file":
        return unquote(path)
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
