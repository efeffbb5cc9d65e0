"""The format of a checkpoint: a folder of files, with a manifest that describes them and is written last.

=============================  ======================================================================================
``sparkdl_checkpoint.json``    format version, versions of sparkdl and torch, epoch and step, number of ranks, the
                               identity of the fit, and size and SHA-256 of the other files
``model.pt``                   parameters and buffers, those of rank 0
``optimizer.pt``               the optimizer's state
``fit.pt``                     schedule, loss scaling, history, position in the data, and other state that is the same
                               on all ranks
``ranks.pt``                   for each rank its random state, sums of the epoch, and buffers that differ from rank 0's
``checkpoint-...``             in place of ``model.pt`` and ``optimizer.pt`` if the module is divided among ranks: the
                               files of :mod:`sparkdl.parallel.checkpoint`, to which each rank writes its part
=============================  ======================================================================================

The folder is in the checkpointDir; its name is ``epoch-00003-step-00000120-`` and eight hexadecimal digits: the epoch,
counted from 1, and the number of its completed steps.

Size and checksum of each file are computed while it is written, and compared before the checkpoint is used. The ``.pt``
files are torch archives, loaded with ``weights_only=True``: they cannot run code. They are read and written on a
*rank*, and read on the *driver* for the model of a completed fit.
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
"""Format of a whole module, which rank 0 writes. Since version 2 a resumed fit keeps its original plan of the rows."""
FORMAT_VERSION = DIVIDED_VERSION = 3
"""Format of a module that is divided among ranks."""
MANIFEST = "sparkdl_checkpoint.json"
MODEL, OPTIMIZER, FIT, RANKS = FILES = ("model.pt", "optimizer.pt", "fit.pt", "ranks.pt")
_DIVIDED = (FIT, RANKS)

_NAME = re.compile(r"epoch-\d+-step-\d+-[0-9a-f]{8}$")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint and of its files.

    Attributes:
        epoch: number of the epoch, from 1.
        step: number of completed steps of the epoch.
        ends_epoch: whether the epoch is completed, with its validation and callbacks.
        finished: whether the fit is completed.
        epochs: total number of epochs of the fit.
        world_size: number of ranks.
        num_ranks_at_start: number of ranks that read rows of their own when the fit began; the rows stay planned for
            this number, on any number of ranks.
        identity: identity of the fit, see :mod:`sparkdl.training.checkpoint.identity`.
        files: size and SHA-256 of each file, by its name.
        format_version: version of the format in which the checkpoint was written.
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
        """Whether the module is divided among ranks, so that each rank has written its part."""
        return self.format_version > WHOLE_VERSION

    @property
    def keeps_plan(self) -> bool:
        """Whether the remaining rows follow the plan that was made for the ranks at the start."""
        return self.format_version >= 2 or self.world_size == self.num_ranks_at_start or self.finished

    @property
    def position(self) -> str:
        """Text that names epoch and step."""
        return (
            f"the end of epoch {self.epoch}" if self.ends_epoch else f"epoch {self.epoch}, step {self.step}"
        )

    def new_name(self) -> str:
        """Return a unique name for the folder; names sort in the order of the fit."""
        return f"epoch-{self.epoch:05d}-step-{self.step:08d}-{uuid.uuid4().hex[:8]}"

    def to_json(self) -> str:
        """Return the manifest as JSON text."""
        content = {
            "sparkdl_version": __version__,
            "torch_version": str(torch.__version__),
            **asdict(self),
        }
        return json.dumps(content, indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class Content:
    """Content of a checkpoint to write, in host memory, where training no longer changes it.

    Attributes:
        manifest: manifest, complete except for ``files``.
        states: content of each file, by its name.
        name: name of the folder; a new name by default.
        parts: future that completes when all ranks have written their parts of the module; None for a whole module.
    """

    manifest: Manifest
    states: dict[str, Any]
    name: str = ""
    parts: Future[None] | None = None


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _NAME.match(name) is not None


def manifest_from_json(text: str | bytes, url: str) -> Manifest:
    """Parse the text of a manifest.

    Raises:
        ValueError: if the text is not a manifest.
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
    """A file is missing, or differs from what was written; the message names the file and the difference."""


def write_file(location: Location, name: str, state: Any) -> dict[str, Any]:
    """Write a state into the folder at ``location`` and return the file's size and checksum."""
    with location.filesystem.open(f"{location.path}/{name}", "wb") as file:
        hashing = HashingFile(file)
        torch.save(state, cast("IO[bytes]", hashing))
    return hashing.describe()


def check_file(location: Location, name: str, expected: Mapping[str, Any]) -> None:
    """Read a file once and compare it with its description.

    Raises:
        DamagedFileError: if the file is missing or differs.
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
            # torch reads an archive with many seeks; from an object store one sequential copy is faster.
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
