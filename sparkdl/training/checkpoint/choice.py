"""The choice of the checkpoint from which a fit resumes: the newest one that is intact and of the same fit.

Runs on every *rank*: rank 0 chooses, and the ranks check the files together.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.checkpoint.folder import DamagedCheckpointError
from sparkdl.collective.byte_exchange import broadcast_bytes
from sparkdl.training.checkpoint.fit_manifest import FitManifest, fit_folder
from sparkdl.training.checkpoint.identity import check_progress, fit_identity
from sparkdl.training.device_batches import read_timeout_s
from sparkdl.training.distribution import num_planned

if TYPE_CHECKING:
    from collections.abc import Collection

    from sparkdl.checkpoint.folder import CheckpointFolder
    from sparkdl.collective import Communicator
    from sparkdl.data import ParquetDataset
    from sparkdl.training.spec import TrainingSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The checkpoint from which a fit resumes.

    Attributes:
        name: name of the checkpoint; None if the fit starts from the beginning.
        num_ranks_at_start: number of readers when the fit began, for which the rows are planned.
        damaged: names of later checkpoints that cannot be read, on rank 0; empty on other ranks.
        identity: identity of the fit, on rank 0; empty on other ranks.
    """

    name: str | None
    num_ranks_at_start: int
    damaged: tuple[str, ...] = ()
    identity: dict[str, Any] = field(default_factory=dict)


def agree_on_checkpoint(
    spec: TrainingSpec,
    dataset: ParquetDataset,
    communicator: Communicator,
    *,
    planned_ranks: int | None = None,
) -> Choice:
    """Choose the checkpoint to resume from on rank 0, and broadcast the choice. Collective.

    Args:
        spec: spec of the fit.
        dataset: the rows.
        communicator: communicator of all ranks.
        planned_ranks: number of ranks for which the rows of a fit without a checkpoint are planned; None for that of
            the plan of the checkpoints, or else of the communicator.

    Raises:
        CheckpointError: as :func:`choose_checkpoint`.
        StoreError: if the folder cannot be read.
    """
    choice = Choice(None, num_planned(spec, planned_ranks or communicator.world_size))
    if spec.checkpoints is None:
        return choice
    folder = fit_folder(spec.checkpoints.url)
    identity: dict[str, Any] = {}
    if communicator.rank == 0:
        identity = fit_identity(spec, dataset, read_timeout_s=read_timeout_s(communicator))
    damaged: tuple[str, ...] = ()
    while True:
        if communicator.rank == 0:
            name, manifest, damaged = choose_checkpoint(folder, identity, spec.epochs, known_damaged=damaged)
            wanted = planned_ranks or spec.checkpoints.num_ranks or communicator.world_size
            planned = num_planned(spec, wanted)
            num_ranks = planned if manifest is None else manifest.num_ranks_at_start
            choice = Choice(name, num_ranks, damaged, identity)
        if communicator.world_size > 1:
            message = json.dumps([choice.name, choice.num_ranks_at_start]).encode()
            name, num_ranks = json.loads(broadcast_bytes(communicator, message, root=0, name="checkpoint"))
            choice = Choice(name, num_ranks, choice.damaged, choice.identity)
        if choice.name is None or _is_intact(folder, choice.name, communicator):
            return choice
        damaged = (*damaged, choice.name)


def _is_intact(folder: CheckpointFolder, name: str, communicator: Communicator) -> bool:
    """Whether all files of a checkpoint are intact; each rank checks its share of them. Collective.

    Raises:
        StoreError: if the files cannot be read.
    """
    is_damaged = np.zeros(1, np.int64)
    try:
        folder.open(name).check(communicator.rank, communicator.world_size)
    except DamagedCheckpointError as error:
        _warn_of_damage(error)
        is_damaged[0] = 1
    if communicator.world_size > 1:
        communicator.allreduce(is_damaged, op="max", name="damage of the checkpoint")
    return not is_damaged[0]


def _warn_of_damage(error: DamagedCheckpointError) -> None:
    logger.warning(
        "A checkpoint is skipped, and an earlier one is tried: in %s, %s.", error.url, error.reason
    )


def choose_checkpoint(
    folder: CheckpointFolder, identity: dict[str, Any], epochs: int, *, known_damaged: Collection[str] = ()
) -> tuple[str | None, FitManifest | None, tuple[str, ...]]:
    """Return name and manifest of the newest complete checkpoint, and the names of later ones, which are damaged.

    Args:
        folder: folder of the checkpoints.
        identity: identity of the fit.
        epochs: total number of epochs of the fit.
        known_damaged: names of checkpoints that are known to be damaged.

    Raises:
        CheckpointError: if the checkpoint is of another fit, of one that has already trained more than ``epochs``
            epochs, or of a newer version of sparkdl.
        StoreError: if the folder cannot be read.
    """
    damaged: list[str] = []
    for name, checkpoint in folder.newest_first():
        if name in known_damaged:
            damaged.append(name)
        elif isinstance(checkpoint, DamagedCheckpointError):
            _warn_of_damage(checkpoint)
            damaged.append(name)
        else:
            manifest = FitManifest(**checkpoint.manifest.about)
            check_progress(folder.url, manifest, identity, epochs)
            return name, manifest, tuple(damaged)
    if damaged:
        logger.warning("%s holds no other checkpoint: the fit starts from the beginning.", folder.url)
    return None, None, tuple(damaged)
