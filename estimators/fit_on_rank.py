"""What a fit runs on every rank: a module-level function with plain arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.estimators.stored_spec import StoredModule, StoredSpec, load_spec, store_module
from sparkdl.training.loop import train

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset
    from sparkdl.launch import RankContext
    from sparkdl.training.history import EpochRecord

IMPORTED_FIRST = (__name__, "torch._dynamo")
"""Modules that every fit needs; the last one is imported by the first optimizer of a process."""


@dataclass(frozen=True)
class FitOutcome:
    """What rank 0 sends to the driver.

    Attributes:
        module: the trained module, whose weights lie in the Store.
        history: one record per epoch.
        model_epoch: number of the epoch that the module is from.
    """

    module: StoredModule
    history: tuple[EpochRecord, ...]
    model_epoch: int


def fit_on_rank(
    context: RankContext, stored: StoredSpec, dataset: ParquetDataset, *, tells_progress: bool = False
) -> FitOutcome | None:
    """Train on this rank; rank 0 returns the outcome, every other rank None. Runs on a *rank*.

    Args:
        context: of this rank.
        stored: what to train and how.
        dataset: the rows.
        tells_progress: whether a step that takes longer than the time to a hang counts as one.
    """
    spec = load_spec(stored)
    went_on = {"went_on": context.progress} if tells_progress else {}
    result = train(spec, communicator=context.communicator, dataset=dataset, report=context.report, **went_on)
    if context.rank != 0:
        return None
    return FitOutcome(store_module(result.module, stored.folder), result.history, result.model_epoch)
