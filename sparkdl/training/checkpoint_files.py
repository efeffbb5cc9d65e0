"""The files of a checkpoint: written in one pass with their sizes and checksums, and read back when these agree.

They are archives of torch, loaded with ``weights_only=True``: nothing in them runs as a program. Runs on a *rank*, and
on the *driver* for the model of a fit that is done.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import tempfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from sparkdl.training.hashing_file import HashingFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sparkdl.data.filesystems import Location

_CHUNK_BYTES = 4 << 20


class DamagedFileError(Exception):
    """A file is missing, or is not what was written; the message says which and how."""


def write_file(location: Location, name: str, state: Any) -> dict[str, Any]:
    """Write a state into the folder at ``location`` and return the file's size and checksum."""
    with location.filesystem.open(f"{location.path}/{name}", "wb") as file:
        hashing = HashingFile(file)
        torch.save(state, cast("IO[bytes]", hashing))
    return hashing.describe()


def check_file(location: Location, name: str, expected: Mapping[str, Any]) -> None:
    """Read a file once and compare it with its description.

    Raises:
        DamagedFileError: if it is another one.
    """
    digest, num_bytes = hashlib.sha256(), 0
    with _opened(location, name) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    if num_bytes != expected.get("bytes"):
        raise DamagedFileError(f"{name} has {num_bytes} bytes instead of {expected.get('bytes')}")
    if digest.hexdigest() != expected.get("sha256"):
        raise DamagedFileError(f"the content of {name} does not match its checksum")


def load_file(location: Location, name: str) -> Any:
    """Return the state in a file, its tensors on the CPU.

    Raises:
        DamagedFileError: if it cannot be read.
    """
    with _opened(location, name) as file:
        try:
            if location.is_local:
                return torch.load(file, map_location="cpu", weights_only=True)
            # An archive is read here and there; an object store is quicker in one go.
            with tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(file, copy, _CHUNK_BYTES)
                copy.seek(0)
                return torch.load(copy, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise DamagedFileError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


@contextmanager
def _opened(location: Location, name: str) -> Iterator[IO[bytes]]:
    try:
        file = location.filesystem.open(f"{location.path}/{name}", "rb")
    except FileNotFoundError:
        raise DamagedFileError(f"{name} is missing") from None
    with file:
        yield file
