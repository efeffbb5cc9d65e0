"""Which checkpoint a fit goes on from: the newest one that is whole, if it is of this fit. Runs on every *rank*."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.collective.byte_exchange import broadcast_bytes
from sparkdl.errors import CheckpointError
from sparkdl.training.checkpoint_files import DamagedFileError
from sparkdl.training.checkpoint_folder import CheckpointFolder
from sparkdl.training.fit_identity import fit_identity
from sparkdl.training.identity_check import check_identity
from sparkdl.training.reading_deadline import read_timeout_s

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.data import ParquetDataset
    from sparkdl.training.checkpoint import Manifest
    from sparkdl.training.spec import TrainingSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """From which checkpoint a fit goes on.

    Attributes:
        name: of the checkpoint; None where the fit starts from the beginning.
        num_ranks_at_start: with how many ranks the fit began, for which its rows are planned.
        damaged: names of later checkpoints that cannot be read.
        identity: of the fit, on rank 0.
    """

    name: str | None
    num_ranks_at_start: int
    damaged: tuple[str, ...] = ()
    identity: dict[str, Any] = field(default_factory=dict)


def agree_on_checkpoint(spec: TrainingSpec, dataset: ParquetDataset, communicator: Communicator) -> Choice:
    """Have rank 0 choose the checkpoint to go on from, and tell the others; collective.

    Raises:
        CheckpointError: as :func:`choose_checkpoint`.
        StoreError: if the folder cannot be read.
    """
    choice = Choice(None, communicator.world_size)
    if spec.checkpoints is None:
        return choice
    if communicator.rank == 0:
        identity = fit_identity(spec, dataset, read_timeout_s=read_timeout_s(communicator))
        name, manifest, damaged = choose_checkpoint(
            CheckpointFolder(spec.checkpoints.url), identity, spec.epochs
        )
        planned = spec.checkpoints.num_ranks or communicator.world_size
        num_ranks = planned if manifest is None else manifest.num_ranks_at_start
        choice = Choice(name, num_ranks, damaged, identity)
    if communicator.world_size == 1:
        return choice
    told = json.dumps([choice.name, choice.num_ranks_at_start]).encode()
    name, num_ranks = json.loads(broadcast_bytes(communicator, told, root=0, name="checkpoint"))
    return Choice(name, num_ranks, choice.damaged, choice.identity)


def choose_checkpoint(
    folder: CheckpointFolder, identity: dict[str, Any], epochs: int
) -> tuple[str | None, Manifest | None, tuple[str, ...]]:
    """Return name and manifest of the newest checkpoint that is whole, and the names of later ones, which are not.

    Raises:
        CheckpointError: if it is of another fit, of one that has come further than ``epochs``, or of a newer version.
        StoreError: if the folder cannot be read.
    """
    damaged: list[str] = []
    for name, manifest in folder.newest_first():
        try:
            if isinstance(manifest, DamagedFileError):
                raise manifest
            check_progress(folder.url, manifest, identity, epochs)
            folder.check(name, manifest)
        except DamagedFileError as error:
            logger.warning(
                "The checkpoint %s/%s is not used: %s. The one before it is.", folder.url, name, error
            )
            damaged.append(name)
            continue
        return name, manifest, tuple(damaged)
    if damaged:
        logger.warning("%s holds no other checkpoint: the fit starts from the beginning.", folder.url)
    return None, None, tuple(damaged)


def check_progress(url: str, manifest: Manifest, identity: dict[str, Any], epochs: int) -> None:
    """Check that a fit of so many epochs may go on from a checkpoint.

    Raises:
        CheckpointError: if it may not; it says why.
    """
    check_identity(manifest.identity, identity, url)
    if manifest.epoch > epochs:
        raise CheckpointError(
            f"checkpointDir {url} holds a fit that has come to {manifest.place}, and epochs is {epochs}. Raise "
            "epochs, or choose another checkpointDir."
        )
    if not manifest.keeps_plan:
        raise CheckpointError(
            f"checkpointDir {url} holds a fit that an older sparkdl has brought to {manifest.place} on "
            f"{manifest.world_size} ranks instead of the {manifest.num_ranks_at_start} that it began with, by a plan "
            "of the rows that this one no longer makes. Let the older sparkdl finish the fit, or choose another "
            "checkpointDir."
        )
