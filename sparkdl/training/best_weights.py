"""Keeps the weights of the best epoch. Runs on *ranks*; the weights lie on rank 0, whose model a fit returns."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkdl.training.fit_state import load_module_state, module_state

if TYPE_CHECKING:
    from sparkdl.training.goal import Goal
    from sparkdl.training.history import EpochRecord

logger = logging.getLogger(__name__)


class BestWeights:
    """A copy of the module's state after the best epoch, in the host's memory: as much as the module takes, once.

    Args:
        goal: what makes an epoch the best; of equal ones it is the first.
        module: whose state is kept.
        is_keeper: whether this rank keeps the weights; the others only note which epoch is the best.

    Attributes:
        epoch: number of the best epoch; None before any.
    """

    def __init__(self, goal: Goal, module: nn.Module, *, is_keeper: bool) -> None:
        self._goal, self._module, self._is_keeper = goal, module, is_keeper
        self._kept: dict[str, dict[str, Any]] = {}
        """What :func:`~sparkdl.training.fit_state.module_state` says, copied."""
        self._best: float | None = None
        self.epoch: int | None = None

    def offer(self, record: EpochRecord) -> None:
        """Keep the module as it is if the epoch that it comes from is the best so far."""
        value = self._goal.value(record)
        if not self._goal.is_better(value, self._best):
            return
        self._best, self.epoch = value, record.epoch
        if self._is_keeper:
            self._kept = {
                kind: {name: _kept(part, self._kept.get(kind, {}).get(name)) for name, part in parts.items()}
                for kind, parts in module_state(self._module).items()
            }

    def restore(self) -> int | None:
        """Give the module of the rank that keeps them the best weights, and return their epoch.

        None, with a warning, where the metric was in no epoch a number; the module then stays as it is.
        """
        if self.epoch is None:
            if self._is_keeper:
                logger.warning(
                    "%s was a number in no epoch, so none is the best: the model is that of the last epoch.",
                    self._goal.metric,
                )
            return None
        if self._is_keeper:
            load_module_state(self._module, self._kept)
        return self.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept; without weights on ranks that do not keep them."""
        return {"best": self._best, "epoch": self.epoch, "weights": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned on the rank that keeps the weights."""
        self._best, self.epoch = state["best"], state["epoch"]
        self._kept = dict(state["weights"]) if self._is_keeper else {}


def _kept(part: Any, before: Any) -> Any:
    """A copy of a part of a state on the host, in the memory of the one before where it fits."""
    if not isinstance(part, Tensor):
        return copy.deepcopy(part)  # the extra state of a module
    if isinstance(before, Tensor) and before.shape == part.shape and before.dtype == part.dtype:
        return before.copy_(part)
    return torch.empty_like(part, device="cpu").copy_(part.detach())
