"""A fit's spec on its way to the ranks: small in the Spark job, its tensors in a folder of the Store.

A job has room for little: Spark Connect refuses a plan above 128 MiB, and the server's JVM may run out of memory long
before. The Store has room, and every rank reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import safetensors.torch

from sparkdl.data.filesystems import open_location
from sparkdl.errors import StoreError
from sparkdl.training.architecture import join_tensors, separate_tensors, split_tensors

if TYPE_CHECKING:
    from sparkdl.training.spec import TrainingSpec

_TENSORS = "_tensors.safetensors"


@dataclass(frozen=True)
class StoredSpec:
    """A spec without its tensors.

    Attributes:
        structure: the pickle without tensors.
        folder: URL of the folder with the tensors.
    """

    structure: bytes
    folder: str


def store_spec(spec: TrainingSpec, folder: str) -> StoredSpec:
    """Write the tensors into a folder of the Store, given by its URL. Runs on the *driver*.

    Raises:
        StoreError: if the Store does not take them.
    """
    structure, tensors = split_tensors(spec, spec.model)
    location = open_location(folder)
    try:
        with location.filesystem.open(f"{location.path}/{_TENSORS}", "wb") as file:
            file.write(safetensors.torch.save(separate_tensors(tensors)))
    except Exception as error:
        raise StoreError(f"The model's weights cannot be written to {folder}: {error}") from error
    return StoredSpec(structure, folder)


def load_spec(stored: StoredSpec) -> TrainingSpec:
    """Return the spec with its tensors. Runs on a *rank*.

    Raises:
        StoreError: if the Store cannot be read here.
    """
    location = open_location(stored.folder)
    try:
        with location.filesystem.open(f"{location.path}/{_TENSORS}", "rb") as file:
            content = file.read()
    except Exception as error:
        raise StoreError(f"The model's weights cannot be read from {stored.folder}: {error}") from error
    return cast("TrainingSpec", join_tensors(stored.structure, safetensors.torch.load(content)))
