"""The format of a checkpoint: a folder of files, and a manifest that describes them and is written last.

=============================  ======================================================================================
``sparkdl_checkpoint.json``    format version, versions of sparkdl and torch, epoch and step, number of ranks, the
                               identity of the fit, and size and SHA-256 of the other files
``model.pt``                   parameters and buffers, those of rank 0
``optimizer.pt``               the optimizer's state
``fit.pt``                     schedule, loss scaling, history, position in the data, and what else all ranks share
``ranks.pt``                   of each rank its random numbers, sums of the epoch, and buffers that differ from rank 0's
``checkpoint-...``             in place of ``model.pt`` and ``optimizer.pt`` where ranks have parts of the module: what
                               :mod:`sparkdl.parallel.checkpoint` writes, each rank its part
=============================  ======================================================================================

The folder lies in the checkpointDir under ``epoch-00003-step-00000120-`` and a few letters: the epoch, counted from
1, and how many of its steps are done.

Each file is written in one pass with its size and checksum, and read back when these agree. The ``.pt`` files are
archives of torch, loaded with ``weights_only=True``: nothing in them runs as a program. They are read and written on
a *rank*, and read on the *driver* for the model of a completed fit.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import tempfile
import uuid
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from sparkdl import __version__
from sparkdl.errors import CheckpointError
from sparkdl.model.weights_file import HashingFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Future

    from sparkdl.data.files.filesystems import Location


WHOLE_VERSION = 2
"""Format that rank 0 writes. Since version 2 a resumed fit keeps the plan of the rows that its first ranks made."""
FORMAT_VERSION = DIVIDED_VERSION = 3
"""Format of fits in which each rank has a part of the module."""
MANIFEST = "sparkdl_checkpoint.json"
MODEL, OPTIMIZER, FIT, RANKS = FILES = ("model.pt", "optimizer.pt", "fit.pt", "ranks.pt")
_DIVIDED = (FIT, RANKS)

_NAME = re.compile(r"epoch-\d+-step-\d+-[0-9a-f]{8}$")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint without its files.

    Attributes:
        epoch: number of the epoch, from 1.
        step: how many of its steps are done.
        ends_epoch: whether that was all of them, and what follows an epoch is done too.
        finished: whether nothing of the fit was left to do.
        epochs: of the whole fit.
        world_size: number of ranks.
        num_ranks_at_start: how many read rows of their own when the fit began; for these the rows are planned on any
            number of ranks.
        identity: of the fit, see :mod:`sparkdl.training.checkpoint.identity`.
        files: size and SHA-256 of each file by name.
        format_version: in which it was written.
    """

    epoch: int
    step: int
    ends_epoch: bool
    finished: bool
    epochs: int
    world_size: int
    num_ranks_at_start: int
    identity: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format_version: int = WHOLE_VERSION

    @property
    def is_divided(self) -> bool:
        """Whether each rank has written its part of the module."""
        return self.format_version > WHOLE_VERSION

    @property
    def keeps_plan(self) -> bool:
        """Whether the rows that are to come follow the plan of the ranks at the start."""
        return self.format_version >= 2 or self.world_size == self.num_ranks_at_start or self.finished

    @property
    def position(self) -> str:
        """Epoch and step in words."""
        return (
            f"the end of epoch {self.epoch}" if self.ends_epoch else f"epoch {self.epoch}, step {self.step}"
        )

    def new_name(self) -> str:
        """Return a name for the folder that no other one has; names sort as the fit went."""
        return f"epoch-{self.epoch:05d}-step-{self.step:08d}-{uuid.uuid4().hex[:8]}"

    def to_json(self) -> str:
        """Return the manifest's text."""
        content = {
            "sparkdl_version": __version__,
            "torch_version": str(torch.__version__),
            **asdict(self),
        }
        return json.dumps(content, indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a checkpoint holds, in host memory and no longer changed by training.

    Attributes:
        manifest: all but ``files``.
        states: what goes into each file.
        name: of the folder; a new one by default.
        parts: is done when all ranks have written their parts of the module, where they have some.
    """

    manifest: Manifest
    states: dict[str, Any]
    name: str = ""
    parts: Future[None] | None = None


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _NAME.match(name) is not None


def manifest_from_json(text: str | bytes, url: str) -> Manifest:
    """Return what a manifest says.

    Raises:
        ValueError: if it is no manifest.
        CheckpointError: if a newer version of sparkdl wrote it.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("format_version"), int):
        raise ValueError("it names no format version")
    if content["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{url} was written in format {content['format_version']} by sparkdl {content.get('sparkdl_version')}, "
            f"and this sparkdl ({__version__}) reads up to format {FORMAT_VERSION}. Install a newer sparkdl, or "
            "choose another checkpointDir."
        )
    try:
        manifest = Manifest(**{name: content[name] for name in Manifest.__dataclass_fields__})
        if set(manifest.files) != set(_DIVIDED if manifest.is_divided else FILES):
            raise ValueError(f"it names the files {', '.join(manifest.files)}")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return manifest


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
