"""The transfer of spec and trained module between driver and ranks, through a folder of the Store.

Their tensors travel in files, because a Spark job can carry little data: Spark Connect refuses a plan above 128 MiB,
and the server's JVM may run out of memory long before. The Store has enough space, and every rank reaches it. Weights
are transferred in chunks in both directions, and the driver memory-maps the trained weights: it holds no copy of the
weights besides the user's own module.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import StoreError
from sparkdl.foreign_errors import store_error, store_errors
from sparkdl.model.architecture import join_module, join_tensors, split_module, split_tensors
from sparkdl.model.weights_file import map_weights, read_weights, verify_file, write_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from sparkdl.training.distribution import ModelDistribution
    from sparkdl.training.spec import TrainingSpec


_TENSORS = "_tensors.safetensors"
_TRAINED = "_trained.safetensors"
_PARTS = "trained"


@dataclass(frozen=True)
class StoredSpec:
    """A spec without its tensors.

    Attributes:
        structure: pickle of the spec without tensors.
        folder: URL of the folder that holds the tensors.
    """

    structure: bytes
    folder: str


@dataclass(frozen=True)
class StoredModule:
    """A trained module without its tensors.

    Attributes:
        structure: pickle of the module without tensors.
        weights: size and checksum of each file with tensors, by the file's path in the folder of the spec.
    """

    structure: bytes
    weights: Mapping[str, Mapping[str, Any]]


def store_spec(spec: TrainingSpec, folder: str) -> StoredSpec:
    """Write the tensors of a spec into a folder of the Store, given by its URL. Runs on the *driver*.

    Raises:
        StoreError: if the folder cannot be written.
    """
    structure, tensors = split_tensors(spec, spec.model)
    _write(tensors, folder, _TENSORS)
    return StoredSpec(structure, folder)


def load_spec(stored: StoredSpec) -> TrainingSpec:
    """Return the spec with its tensors. Runs on a *rank*.

    Raises:
        StoreError: if the folder cannot be read on this rank.
    """
    location = open_location(stored.folder)
    try:
        with location.filesystem.open(f"{location.path}/{_TENSORS}", "rb") as file:
            tensors = read_weights(file)
    except Exception as error:
        raise store_error(f"The model's weights cannot be read from {stored.folder}", error) from error
    return cast("TrainingSpec", join_tensors(stored.structure, tensors))


def store_module(module: nn.Module, folder: str) -> StoredModule:
    """Write the tensors of a trained module into the folder of its spec. Runs on *rank* 0.

    Raises:
        StoreError: if the folder cannot be written from this rank.
        SerializationError: if the module can no longer be pickled.
    """
    structure, tensors = split_module(module)
    return StoredModule(structure, {_TRAINED: _write(tensors, folder, _TRAINED)})


def store_trained(
    distribution: ModelDistribution, folder: str, *, before: Callable[[], None] = lambda: None
) -> StoredModule | None:
    """Write a trained module into the folder of its spec; return it on *rank* 0, None elsewhere. Collective.

    If the module is divided among ranks, all ranks write their parts, and no rank gathers the whole module.

    Args:
        distribution: distribution that holds the module.
        folder: URL of the folder.
        before: called before anything is written.

    Raises:
        StoreError: if the folder cannot be written from this rank.
        SerializationError: if the module can no longer be pickled.
    """
    from sparkdl.training.distribution import DividedModel, Replicas  # on ranks only, like the training loop

    before()
    if isinstance(distribution, DividedModel):
        from sparkdl.parallel.weights import save_weights

        files = save_weights(distribution.parts, f"{folder}/{_PARTS}", distribution.layout)
        tensors = distribution.other_tensors()
        if distribution.rank != 0:
            return None
        others = {_TRAINED: _write(tensors, folder, _TRAINED)}
        parts = {f"{_PARTS}/{name}": written for name, written in files.items()}
        return StoredModule(distribution.structure, {**others, **parts})
    assert isinstance(distribution, Replicas), "all others are divided"
    return store_module(distribution.whole_module(), folder) if distribution.rank == 0 else None


def fetch_module(stored: StoredModule, folder: str) -> nn.Module:
    """Return a trained module whose weights are mapped from local copies of the files. Runs on the *driver*.

    The disk space of the copies is released with the module.

    Raises:
        StoreError: if the folder cannot be read, or holds other data than the ranks wrote.
        SavedModelError: if the module's classes are not installed on the driver.
    """
    location = open_location(folder)
    tensors: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder_here:
        path = Path(folder_here) / _TRAINED
        for name, written in stored.weights.items():
            # A copy, as the Store's file may be removed while the module is in use. The mapping outlives unlink().
            with (
                store_errors(f"The model's weights cannot be read from {folder}"),
                location.filesystem.open(f"{location.path}/{name}", "rb") as there,
                path.open("wb") as here,
            ):
                verify_file(there, written, partial(_differ, f"{folder}/{name}"), copy=here)
            tensors |= map_weights(path)
            path.unlink()
        return join_module(stored.structure, tensors)


def _differ(url: str, reason: str) -> StoreError:
    return StoreError(
        f"The trained weights in {url} are not what a rank wrote: {reason}. Choose a Store that driver and executors "
        "see alike."
    )


def _write(tensors: Mapping[str, Tensor], folder: str, name: str) -> dict[str, Any]:
    location = open_location(folder)
    with (
        store_errors(f"The model's weights cannot be written to {folder}"),
        location.filesystem.open(f"{location.path}/{name}", "wb") as file,
    ):
        return write_weights(tensors, file)
