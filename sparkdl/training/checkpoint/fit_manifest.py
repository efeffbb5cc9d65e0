"""The description of a fit in the manifests of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.checkpoint.folder import Checkpoint, CheckpointFolder
from sparkdl.data.files.lease import check_lease

if TYPE_CHECKING:
    from sparkdl.checkpoint.held import HeldCheckpoint


@dataclass(frozen=True, kw_only=True)
class FitManifest:
    """Position and identity of a fit; the manifest of a checkpoint holds them.

    Attributes:
        epoch: number of the epoch, from 1.
        step: number of completed steps of the epoch.
        ends_epoch: whether the epoch is completed, with its validation and callbacks.
        finished: whether the fit is completed.
        epochs: total number of epochs of the fit.
        layout: name of the layout of the ranks.
        num_ranks_at_start: number of ranks that read rows of their own when the fit began; the rows stay planned for
            this number, on any number of ranks.
        identity: identity of the fit, see :mod:`sparkdl.training.checkpoint.identity`.
    """

    epoch: int
    step: int
    ends_epoch: bool
    finished: bool
    epochs: int
    layout: str
    num_ranks_at_start: int
    identity: dict[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint | HeldCheckpoint) -> FitManifest:
        """Return the description in the manifest of a checkpoint."""
        return cls(**checkpoint.manifest.about)

    @property
    def position(self) -> str:
        """Text that names epoch and step."""
        return (
            f"the end of epoch {self.epoch}" if self.ends_epoch else f"epoch {self.epoch}, step {self.step}"
        )


def fit_folder(url: str, *, num_kept: int = 1, lease: str = "") -> CheckpointFolder:
    """Return the folder of the checkpoints of a fit.

    Args:
        url: path or URL of the folder.
        num_kept: number of the newest checkpoints to keep.
        lease: name of the driver's lease, to be checked before each change of the folder; empty for none.
    """
    check = partial(check_lease, url, lease, user="fit", setting="checkpointDir") if lease else None
    return CheckpointFolder(url, "fit", num_kept=num_kept, check=check)
