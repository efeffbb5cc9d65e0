"""Evaluates a model on the validation rows, each of them once, on one of the ranks."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from sparkdl.data import ParquetDataset, ParquetFeed
from sparkdl.data.feed.shards import steps_per_epoch
from sparkdl.model.architecture import evaluating
from sparkdl.random_state import random_numbers_apart
from sparkdl.training.checkpoint.state import buffers_kept, loss_buffers
from sparkdl.training.device_batches import batches_for, read_timeout_s
from sparkdl.training.history import LossSum
from sparkdl.training.metrics import EpochMetrics
from sparkdl.training.objective import ErrorContext, StepPosition

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    import torch

    from sparkdl.collective import Communicator
    from sparkdl.training.distribution import ModelDistribution
    from sparkdl.training.objective import Batch, Objective
    from sparkdl.training.spec import TrainingSpec

_CACHE_LIMIT_BYTES = 1 << 30
_UNASKED_CACHE_LIMIT_BYTES = 256 << 20


class Validation:
    """Evaluates the module, as it currently is, on the validation rows.

    Rows come in the order of the files. Every row is seen once, also if there are fewer rows than ranks, so the results
    do not depend on the number of ranks, except for the order of summation. The validation rows are scattered over all
    files, and a rank reads its part of the files in every epoch, unless it can keep its rows: up to 256 MiB in memory,
    or, if the fit has a cache, up to 1 GiB in a cache of the same kind.

    Args:
        spec: spec of the fit, which holds the validation rows and the metrics.
        dataset: dataset that holds the rows.
        communicator: communicator of all ranks, open.
        distribution: distribution of the module over the ranks.
        objective: applies the module and its loss.
        device: device of the module.
        resources: exit stack that closes the feed.
        on_step: called before each batch.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        *,
        dataset: ParquetDataset,
        communicator: Communicator,
        distribution: ModelDistribution,
        objective: Objective,
        device: torch.device,
        resources: ExitStack,
        on_step: Callable[[], None],
    ) -> None:
        self._on_step = on_step
        assert spec.validation_rows is not None, "made where there is something to validate on"
        self._communicator, self._device = communicator, device
        self._objective = objective.for_validation()
        self._distribution = distribution
        self._metrics, self._losses = spec.metrics, spec.losses
        num_rows = sum(spec.validation_rows.counts or ())
        # A feed needs at least one row per rank.
        num_readers = min(distribution.num_readers, num_rows)
        self._num_steps = steps_per_epoch(num_rows, num_readers, spec.batch_size)
        self._feed: ParquetFeed | None = None
        if distribution.reader < num_readers:
            self._feed = resources.enter_context(
                ParquetFeed(
                    dataset,
                    columns=spec.columns(),
                    rank=distribution.reader,
                    world_size=num_readers,
                    batch_size=spec.batch_size,
                    shuffle=False,
                    num_threads=spec.num_reader_threads,
                    row_filter=spec.validation_rows,
                    cache=spec.cache or "memory",
                    read_timeout_s=read_timeout_s(communicator),
                    cache_limit_bytes=_CACHE_LIMIT_BYTES if spec.cache else _UNASKED_CACHE_LIMIT_BYTES,
                )
            )

    def run(self, epoch: int, spare: Batch | None) -> tuple[dict[str, float], float]:
        """Return ``val_loss`` and each metric as ``val_<name>``, and the seconds it took. Collective.

        The results are the same on every rank; the seconds are the mean over the ranks.

        During the validation module and losses are in ``eval()`` mode and compute no gradients. The module's buffers
        are overwritten with rank 0's and stay so, because a fit returns the module with rank 0's buffers. The buffers
        of losses are rank 0's during the validation. Modes, buffers of losses and the random states of Python, NumPy
        and torch are restored afterwards.

        Args:
            epoch: number of the epoch, from 1, for error messages.
            spare: a batch with rows, for steps in which this rank has no rows but its part of the module is needed;
                it may be None where each rank has a replica.

        Raises:
            TrainingError: if the model, a loss or a metric fails; the message names rank and epoch, and the step if
                there is one.
            DataError: if rows cannot be read.
        """
        started = time.perf_counter()
        module = self._distribution.evaluated
        self._distribution.share_buffers(module.buffers())
        metrics = EpochMetrics(self._metrics, self._device)
        losses = LossSum(self._device)
        with (
            evaluating(module),
            evaluating(self._losses),
            buffers_kept(loss_buffers(self._losses, module).values()) as buffers,
            random_numbers_apart(self._device),
        ):
            self._distribution.share_buffers(buffers)
            if self._feed is None:
                self._take_part(spare, self._num_steps)
            else:
                first = StepPosition(self._communicator.rank, epoch, 1, self._distribution.reader)
                prepared = self._objective.prepare_all(self._feed.epoch(0), first, of_validation=True)
                with closing(batches_for(self._device, prepared)) as batches:
                    for step, batch in enumerate(batches, start=1):
                        self._on_step()
                        rows = self._objective.num_rows(batch)
                        if not rows:
                            self._take_part(spare, 1)
                            continue
                        where = first._replace(step=step).text(of_validation=True)
                        with ErrorContext("evaluating the batch", rank=first.rank, where=where, batch=batch):
                            evaluation = self._distribution.evaluate(self._objective, batch)
                            if self._distribution.counts_outputs:
                                metrics.add(evaluation, rows)
                            if self._distribution.counts_rows:
                                losses.add(evaluation.term.mean, evaluation.term.weight)
        self._distribution.end_evaluation()
        own_loss = float(losses.total)  # waits for the device
        values, (total, all_weight, seconds) = metrics.close(
            self._communicator, own_loss, losses.weight, time.perf_counter() - started
        )
        loss = total / all_weight if all_weight else float("nan")
        values = {f"val_{name}": value for name, value in {"loss": loss, **values}.items()}
        return values, seconds / self._communicator.world_size

    def _take_part(self, spare: Batch | None, num_steps: int) -> None:
        """Take part in other ranks' steps if this rank has a part of the module; do nothing if it has a replica."""
        if not self._distribution.is_divided:
            return
        assert spare is not None, "validation follows steps"
        for _ in range(num_steps):
            self._on_step()
            self._distribution.evaluate(self._objective, spare)
