"""What is remembered of each epoch, and how it is added up on a rank without waiting for the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sparkdl.collective import Communicator

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One epoch over all ranks.

    Attributes:
        epoch: number of the epoch, from 1.
        loss: mean training loss over the epoch's rows (per row also for a loss that sums).
        rows: rows seen by all ranks together.
        seconds: time the epoch took on the slowest rank.
        rows_per_s: ``rows / seconds``.
        data_wait_share: share of the time in which training waited for the feed, from 0 to 1, on average over the
            ranks; None where an older version of sparkdl did not measure it.
        learning_rate: that of the optimizer's first group in the epoch's last update; None where an older version of
            sparkdl did not note it.
    """

    epoch: int
    loss: float
    rows: int
    seconds: float
    rows_per_s: float
    data_wait_share: float | None = None
    learning_rate: float | None = None


def join_meter_states(states: Sequence[Mapping[str, float]], rank: int) -> dict[str, float]:
    """Return what a rank's meter goes on with when the states are those of another number of ranks.

    Rank 0 has had all rows then; each rank has taken the time of the slowest one and waited as they did on average.
    """
    totals = {name: sum(state[name] for state in states) for name in ("loss_sum", "weight", "rows")}
    return {
        **(totals if rank == 0 else dict.fromkeys(totals, 0.0)),
        "waited_s": sum(state["waited_s"] for state in states) / len(states),
        "elapsed_s": max(state["elapsed_s"] for state in states),
    }


class EpochMeter:
    """Adds up one epoch of one rank; the sum of the losses stays on the device until somebody asks."""

    def __init__(self, epoch: int, device: torch.device) -> None:
        self._epoch = epoch
        # Sums over thousands of steps need more digits than float32; MPS has no float64, CPU and CUDA do.
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._weight = 0.0
        self._rows = 0
        self._waited_s = 0.0
        self._started = time.perf_counter()

    def time_waits(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, counting the time until each is there as time spent waiting for data."""
        iterator = iter(batches)
        nothing = object()
        while True:
            started = time.perf_counter()
            batch = next(iterator, nothing)
            self._waited_s += time.perf_counter() - started
            if batch is nothing:
                return
            yield cast("Batch", batch)

    def add(self, loss_mean: Tensor, weight: float, rows: int) -> None:
        """Add one step: the detached mean loss of this rank's rows, the weight it stands for, the rows."""
        if weight > 0:
            self._loss_sum += loss_mean.to(torch.float64) * weight
        self._weight += weight
        self._rows += rows

    def running_loss(self) -> float:
        """Return this rank's mean loss of the epoch so far, waiting for the device; NaN before any row."""
        return float(self._loss_sum) / self._weight if self._weight else float("nan")

    def state_dict(self) -> dict[str, float]:
        """Return what this rank has added up so far, waiting for the device."""
        return {
            "loss_sum": float(self._loss_sum),
            "weight": self._weight,
            "rows": self._rows,
            "waited_s": self._waited_s,
            "elapsed_s": time.perf_counter() - self._started,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with what :meth:`state_dict` returned."""
        self._loss_sum.fill_(state["loss_sum"])
        self._weight = state["weight"]
        self._rows = int(state["rows"])
        self._waited_s = state["waited_s"]
        self._started = time.perf_counter() - state["elapsed_s"]

    def close(self, communicator: Communicator, *, learning_rate: float | None = None) -> EpochRecord:
        """Average over all ranks by rows, with one sum and one maximum. Collective: every rank calls it.

        Args:
            communicator: of all ranks.
            learning_rate: to note in the record.
        """
        loss_of_rank = float(self._loss_sum)  # waits for the device
        elapsed = time.perf_counter() - self._started
        totals = np.array(
            [loss_of_rank, self._weight, self._rows, self._waited_s / elapsed], dtype=np.float64
        )
        seconds = np.array([elapsed], dtype=np.float64)
        if communicator.world_size > 1:
            communicator.allreduce(totals, op="sum")
            communicator.allreduce(seconds, op="max")
        loss_sum, weight, rows, wait_shares = (float(total) for total in totals)
        duration = float(seconds[0])
        return EpochRecord(
            epoch=self._epoch,
            loss=loss_sum / weight if weight else float("nan"),
            rows=round(rows),
            seconds=duration,
            rows_per_s=rows / duration,
            data_wait_share=wait_shares / communicator.world_size,
            learning_rate=learning_rate,
        )
