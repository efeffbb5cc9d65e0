"""The choice of the checkpoint from which a fit resumes: the newest one that is intact and of the same fit.

Runs on every *rank*: rank 0 chooses, and the ranks check the files together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.collective.byte_exchange import allgather_json
from sparkdl.training.checkpoint.fit_manifest import FitManifest, fit_folder
from sparkdl.training.checkpoint.identity import check_progress, fit_identity
from sparkdl.training.device_batches import read_timeout_s
from sparkdl.training.distribution import num_planned

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from sparkdl.collective import Communicator
    from sparkdl.data import ParquetDataset
    from sparkdl.training.spec import TrainingSpec


@dataclass(frozen=True)
class Choice:
    """The checkpoint from which a fit resumes.

    Attributes:
        name: name of the checkpoint; None if the fit starts from the beginning.
        num_ranks_at_start: number of readers when the fit began, for which the rows are planned.
        damaged: names of later checkpoints that cannot be read.
        identity: identity of the fit, on rank 0; empty on other ranks.
    """

    name: str | None
    num_ranks_at_start: int
    damaged: Collection[str] = ()
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
        planned_ranks: number of ranks for which the rows of a fit without a checkpoint are planned. None for the
            number in the plan of the checkpoints; without checkpoints, for that of the communicator.

    Raises:
        CheckpointError: if the checkpoint is of another fit, of one that has already trained more epochs than this
            one, or of a newer version of sparkdl.
        StoreError: if the folder cannot be read.
    """
    if spec.checkpoints is None:
        return Choice(None, num_planned(spec, planned_ranks or communicator.world_size))
    folder = fit_folder(spec.checkpoints.url)
    identity: dict[str, Any] = {}
    if communicator.rank == 0:
        identity = fit_identity(spec, dataset, read_timeout_s=read_timeout_s(communicator))

    def on_all_ranks(work: Callable[[], Any]) -> list[Any]:
        if communicator.world_size == 1:
            return [work()]
        return allgather_json(communicator, work(), name="checkpoint")

    checkpoint = folder.newest(
        lambda checkpoint: check_progress(folder.url, FitManifest.of(checkpoint), identity, spec.epochs),
        share=(communicator.rank, communicator.world_size),
        on_all_ranks=on_all_ranks,
    )
    if checkpoint is None:
        wanted = planned_ranks or spec.checkpoints.num_ranks or communicator.world_size
        return Choice(None, num_planned(spec, wanted), folder.damaged, identity)
    return Choice(checkpoint.name, FitManifest.of(checkpoint).num_ranks_at_start, folder.damaged, identity)
