"""A fit's spec on its way to the ranks, and the trained module on its way back: the tensors in a folder of the Store.

A job has room for little: Spark Connect refuses a plan above 128 MiB, and the server's JVM may run out of memory long
before. The Store has room, and every rank reaches it. Weights go there and back in pieces, and the driver maps those
that come back into memory: it holds no copy of them besides the user's own module.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sparkdl.data.files.failures import explain_failure
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import SerializationError, StoreError
from sparkdl.model.architecture import join_module, join_tensors, split_module, split_tensors
from sparkdl.model.weights_file import HashingFile, map_weights, read_weights, write_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from sparkdl.training.spec import TrainingSpec

_TENSORS = "_tensors.safetensors"
_TRAINED = "_trained.safetensors"
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredSpec:
    """A spec without its tensors.

    Attributes:
        structure: the pickle without tensors.
        folder: URL of the folder with the tensors.
    """

    structure: bytes
    folder: str


@dataclass(frozen=True)
class StoredModule:
    """A trained module without its tensors.

    Attributes:
        structure: the pickle without tensors.
        weights: size and checksum of the file with the tensors, which lies in the folder of the spec.
    """

    structure: bytes
    weights: Mapping[str, Any]


def store_spec(spec: TrainingSpec, folder: str) -> StoredSpec:
    """Write the tensors into a folder of the Store, given by its URL. Runs on the *driver*.

    Raises:
        StoreError: if the Store does not take them.
    """
    structure, tensors = split_tensors(spec, spec.model)
    _write(tensors, folder, _TENSORS)
    return StoredSpec(structure, folder)


def load_spec(stored: StoredSpec) -> TrainingSpec:
    """Return the spec with its tensors. Runs on a *rank*.

    Raises:
        StoreError: if the Store cannot be read here.
    """
    location = open_location(stored.folder)
    try:
        with location.filesystem.open(f"{location.path}/{_TENSORS}", "rb") as file:
            tensors = read_weights(file)
    except Exception as error:
        raise _unreadable(stored.folder, error) from error
    return cast("TrainingSpec", join_tensors(stored.structure, tensors))


def store_module(module: nn.Module, folder: str) -> StoredModule:
    """Write the tensors of a trained module into the folder of its spec. Runs on *rank* 0.

    Raises:
        StoreError: if the Store does not take them from here.
        SerializationError: if the module can no longer be pickled.
    """
    structure, tensors = split_module(module)
    return StoredModule(structure, _write(tensors, folder, _TRAINED))


def fetch_module(stored: StoredModule, folder: str) -> nn.Module:
    """Return a trained module whose weights are mapped from a file of its own, which goes with it. On the *driver*.

    Raises:
        StoreError: if the Store cannot be read, or holds something else than the rank wrote.
        SavedModelError: if the module's classes are not installed here.
    """
    location = open_location(folder)
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as own:
        path = Path(own) / _TRAINED
        try:
            # Its own, as a Store's file may go while the module stays. What is mapped outlives the name.
            with (
                location.filesystem.open(f"{location.path}/{_TRAINED}", "rb") as there,
                path.open("wb") as here,
            ):
                copied = HashingFile(here)
                while chunk := there.read(_CHUNK_BYTES):
                    copied.write(chunk)
        except Exception as error:
            raise _unreadable(folder, error) from error
        if copied.describe() != stored.weights:
            raise StoreError(
                f"The trained weights in {folder} are not what rank 0 wrote: {copied.describe()} instead of "
                f"{dict(stored.weights)}. Choose a Store that driver and executors see alike."
            )
        return join_module(stored.structure, map_weights(path))


def _write(tensors: Mapping[str, Tensor], folder: str, name: str) -> dict[str, Any]:
    location = open_location(folder)
    try:
        with location.filesystem.open(f"{location.path}/{name}", "wb") as file:
            return write_weights(tensors, file)
    except SerializationError:
        raise
    except Exception as error:
        raise StoreError(
            f"The model's weights cannot be written to {folder}: {explain_failure(error)}"
        ) from error


def _unreadable(folder: str, error: Exception) -> StoreError:
    return StoreError(f"The model's weights cannot be read from {folder}: {explain_failure(error)}")
