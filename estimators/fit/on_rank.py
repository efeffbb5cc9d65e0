"""The function that a fit runs on every rank: it loads the spec, trains, and stores the trained module.

:func:`fit_on_rank` is a module-level function with plain arguments, which the driver names and ranks call.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.estimators.fit.transfer import StoredModule, StoredSpec, load_spec, store_trained

if TYPE_CHECKING:
    from sparkdl.collective import WorldReport
    from sparkdl.data import ParquetDataset
    from sparkdl.launch import RankContext
    from sparkdl.training.history import EpochRecord


IMPORTED_FIRST = (
    __name__,
    "sparkdl.training.trainer",
    "sparkdl.estimators.fit.host_watch",
    "sparkdl.data.petastorm.reader",
    "torch._dynamo",
)
"""Modules that every fit needs; the last one is imported by the first optimizer of a process."""


@dataclass(frozen=True)
class FitOutcome:
    """What rank 0 sends to the driver.

    Attributes:
        module: the trained module, whose weights lie in the Store.
        history: one record per epoch.
        model_epoch: number of the epoch that the module is from.
        communication: report of all ranks; None if it was not requested.
    """

    module: StoredModule
    history: tuple[EpochRecord, ...]
    model_epoch: int
    communication: WorldReport | None = None


def fit_on_rank(
    context: RankContext,
    stored: StoredSpec,
    dataset: ParquetDataset,
    *,
    tells_progress: bool = False,
    is_watched: bool = False,
) -> FitOutcome | None:
    """Train on this rank; rank 0 returns the outcome, every other rank None. Runs on a *rank*.

    Args:
        context: of this rank.
        stored: what to train and how.
        dataset: the rows.
        tells_progress: whether a step that takes longer than the time to a hang counts as one.
        is_watched: whether the driver wants to hear how busy hosts are, and how ranks communicated.
    """
    # The driver does without them.
    from sparkdl.estimators.fit.host_watch import HostWatch
    from sparkdl.training.trainer import train

    spec = load_spec(stored)
    communicator = context.communicator
    reports_for_host = is_watched and context.topology.local_rank == 0
    with HostWatch(context.report) if reports_for_host else nullcontext():
        result = train(
            spec,
            communicator=communicator,
            dataset=dataset,
            report=context.report,
            on_step=context.progress if tells_progress else lambda: None,
            on_position=context.note_place,
            # To write the model takes as long as it takes.
            keep=partial(store_trained, folder=stored.folder, before=partial(context.progress, done=True)),
        )
    communication = communicator.gather_report() if is_watched else None
    if context.rank != 0:
        return None
    return FitOutcome(result.module, result.history, result.model_epoch, communication)
