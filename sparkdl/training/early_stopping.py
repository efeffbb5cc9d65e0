"""Ends a fit that no longer gets better. Runs on every *rank*, on the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.training.goal import Goal
    from sparkdl.training.history import EpochRecord


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a fit goes on without getting better.

    Attributes:
        epochs: in a row without an improvement, after which it ends.
        min_delta: by more than which a value has to be better to count.
    """

    epochs: int
    min_delta: float = 0.0


class EarlyStopping:
    """Counts epochs without an improvement over the best value so far.

    Args:
        goal: what is to become better.
        patience: how long to wait for it.

    Attributes:
        best: the value that later ones are held against; None before the first that is a number.
        num_epochs: that have passed since.
    """

    def __init__(self, goal: Goal, patience: Patience) -> None:
        self._goal, self._patience = goal, patience
        self.best: float | None = None
        self.num_epochs = 0

    @property
    def is_over(self) -> bool:
        """Whether the fit is to end."""
        return self.num_epochs >= self._patience.epochs

    def observe(self, record: EpochRecord) -> None:
        """Take in an epoch."""
        value = self._goal.value(record)
        if self._goal.is_better(value, self.best, by=self._patience.min_delta):
            self.best, self.num_epochs = value, 0
        else:
            self.num_epochs += 1

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"best": self.best, "num_epochs": self.num_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned."""
        self.best, self.num_epochs = state["best"], state["num_epochs"]
