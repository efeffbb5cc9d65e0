"""Notices the first loss that is not finite, without making a GPU wait in every step. Runs on a *rank*."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import TrainingError

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.training.objective import Batch

_NEVER = np.iinfo(np.int64).max
_SETTLE_EVERY_STEPS = 50


class FiniteLossCheck:
    """Checks losses at once on CPU; on CUDA takes notes on the device, which all ranks compare now and then.

    On CPU the rank that sees the loss raises before its backward pass, and the others wait for its gradients no later
    than in the update to which the step belongs: of several losses in one update any one may be named. On CUDA it is
    the earliest step over all ranks.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._is_deferred = device.type != "cpu"
        self._first_bad_step = torch.full((), _NEVER, dtype=torch.int64, device=device)

    def observe(self, loss_mean: Tensor, batch: Batch, *, epoch: int, step: int) -> None:
        """Look at this rank's loss of one step, and at the batch if that explains it.

        Raises:
            TrainingError: on CPU, if it is not finite.
        """
        if self._is_deferred:
            bad = torch.where(torch.isfinite(loss_mean.detach()), _NEVER, step)
            self._first_bad_step = torch.minimum(self._first_bad_step, bad)
            return
        value = float(loss_mean.detach())
        if not math.isfinite(value):
            raise TrainingError(
                _message(str(value), epoch, step, f" on rank {self._communicator.rank}", _bad_columns(batch))
            )

    def settle(self, *, epoch: int, step: int, steps: int) -> None:
        """Compare notes after every 50th and the last step of an epoch. Collective on CUDA, nothing on CPU.

        Raises:
            TrainingError: on every rank, naming the earliest step in which some rank's loss was not finite.
        """
        if not self._is_deferred or (step % _SETTLE_EVERY_STEPS and step != steps):
            return
        first = np.array([int(self._first_bad_step)], dtype=np.int64)
        if self._communicator.world_size > 1:
            self._communicator.allreduce(first, op="min")
        if first[0] != _NEVER:
            raise TrainingError(_message("NaN or infinite", epoch, int(first[0]), ""))


def _message(value: str, epoch: int, step: int, where: str, bad_columns: str = "") -> str:
    what_to_do = (
        f"In its batch {bad_columns}. Fill those values, or leave the rows out."
        if bad_columns
        else "Lower the learning rate, or look for NaN and extreme values in the data."
    )
    return f"The loss became {value} in epoch {epoch}, step {step}{where}. {what_to_do}"


def _bad_columns(batch: Batch) -> str:
    """Tell which columns hold what is no finite number, and in how many rows."""
    told = []
    for name, values in batch.items():
        if not (values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"):
            continue  # strings, which a trainStep may be given, and integers, which all are finite
        is_bad = ~torch.isfinite(torch.as_tensor(values))
        count = int(is_bad.reshape(len(values), -1).any(dim=1).sum())
        if count:
            told.append(f"{name!r} is NaN or infinite in {count} of {len(values)} rows")
    return " and ".join(told)
