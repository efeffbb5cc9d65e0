"""A filesystem of local files whose second file fails in a chosen way. Runs on *ranks*."""

from __future__ import annotations

import threading
from typing import Any

import fsspec
from botocore.exceptions import ClientError
from fsspec.implementations.local import LocalFileSystem
from s3fs.errors import translate_boto_error

BAD_FILE = "part-1.parquet"


class FaultyFiles(LocalFileSystem):
    """Local files; ``part-1.parquet`` cannot be opened."""

    protocol = "faulty"
    cachable = False
    fault = "silent"

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if path.endswith(BAD_FILE):
            if FaultyFiles.fault == "silent":
                threading.Event().wait()
            said = {"Error": {"Code": "ExpiredToken", "Message": "The provided token has expired."}}
            raise translate_boto_error(ClientError(said, "GetObject"))
        return super().open(path, mode, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("faulty://"))


def register(fault: str) -> None:
    """Register ``faulty://``, under which a local folder's second file is ``"silent"`` or ``"expired"``."""
    FaultyFiles.fault = fault
    fsspec.register_implementation("faulty", FaultyFiles, clobber=True)
