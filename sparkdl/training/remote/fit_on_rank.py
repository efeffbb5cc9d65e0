"""The function that an estimator's fit runs on every rank: it loads the spec, trains, and stores the trained module.

:func:`fit_on_rank` is a module-level function with plain arguments: the driver pickles its name, and ranks call it.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.collective.torchrun_variables import export_torchrun_variables
from sparkdl.training.remote.transfer import StoredSpec, load_spec, store_trained

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset
    from sparkdl.launch.rank.context import RankContext
    from sparkdl.monitor import Monitor
    from sparkdl.training.history import FitOutcome


IMPORTED_FIRST = (
    __name__,
    "sparkdl.training.trainer",
    "sparkdl.training.remote.host_watch",
    "sparkdl.data.feed.epoch_reader",
    "torch._dynamo",
)
"""Modules that every fit imports; ``torch._dynamo`` is imported by the first optimizer of a process."""


def fit_on_rank(
    context: RankContext,
    stored: StoredSpec,
    dataset: ParquetDataset,
    *,
    has_gpu: bool = False,
    reports_progress: bool = False,
    reports_load: bool = False,
    lease: str = "",
    planned_ranks: int | None = None,
    monitor: Monitor | None = None,
) -> FitOutcome | None:
    """Train on this rank; rank 0 returns the outcome, every other rank None. Runs on a *rank*.

    In an elastic launch, the ranks train until one of them is lost or another one joins. They then form another world,
    and continue with the step that was in flight.

    Args:
        context: the launcher's context of this rank.
        stored: the stored spec, which says what to train and how.
        dataset: the rows to train on.
        has_gpu: whether this rank has a GPU of its own, and sees no other.
        reports_progress: whether to report each step as progress, so that a step longer than the hang timeout counts
            as a hang.
        reports_load: whether to report the load of the hosts and the communication to the driver.
        lease: name of the driver's lease on the folder of the checkpoints; empty for none. In an elastic launch each
            world has one of its own.
        planned_ranks: number of ranks for which the rows of an elastic launch are planned, so that a step has as many
            rows in all worlds; None for as many as there are in each world.
        monitor: settings of what samples the ranks; None for no monitor.
    """
    # Imported here: the driver imports this module and needs none of them.
    from sparkdl.training.checkpoint.handover import Handover
    from sparkdl.training.remote.host_watch import HostWatch
    from sparkdl.training.trainer import train

    spec = load_spec(stored)
    handover = Handover(context, planned_ranks) if context.is_elastic else None

    def train_in_world() -> FitOutcome | None:
        export_torchrun_variables(context.job, context.topology, is_alone=has_gpu)
        in_world = spec
        if spec.checkpoints is not None:
            name = lease if context.world is None else context.world.lease
            in_world = replace(spec, checkpoints=replace(spec.checkpoints, lease=name))
        communicator = context.communicator
        reports_for_host = reports_load and context.topology.local_rank == 0
        sampling = (
            nullcontext()
            if monitor is None
            else monitor.on_rank(context.rank, context.world_size, context.report, precision=spec.precision)
        )
        with HostWatch(context.report) if reports_for_host else nullcontext(), sampling as steps:
            outcome = train(
                in_world,
                communicator=communicator,
                dataset=dataset,
                report=context.report,
                on_step=context.progress if reports_progress else lambda: None,
                on_position=context.note_position,
                # done=True: the hang timeout must not apply to writing the model.
                keep=partial(
                    store_trained, folder=stored.folder, before=partial(context.progress, done=True)
                ),
                handover=handover,
                monitor=steps,
            )
        if reports_load:
            outcome = replace(outcome, communication=communicator.gather_report())
        return outcome if context.rank == 0 else None

    while True:
        try:
            outcome = train_in_world()
            if context.finish(progress=-1 if handover is None else handover.progress):
                return outcome
            if spec.parallelism is not None:
                spec = load_spec(stored)  # the module was divided in place
        except Exception as error:
            if handover is None or not context.can_continue(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            # The frames of a failed step hold its batches and gradients.
            traceback.clear_frames(error.__traceback__)
            context.note_position("")
            if spec.parallelism is not None:
                spec = load_spec(stored)
            context.meet_again(reason, progress=handover.progress)
            handover.leave()
