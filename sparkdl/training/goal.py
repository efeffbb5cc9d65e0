"""Which number of an epoch tells how good the model is, and in which direction. The same on *driver* and *ranks*."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.training.history import EpochRecord

MODES = ("min", "max")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A metric that is to become small or large.

    Attributes:
        metric: ``"loss"``, ``"val_loss"``, or the name of a metric, with ``val_`` before it on validation rows.
        mode: ``"min"`` or ``"max"``.
    """

    metric: str
    mode: str = "min"

    def value(self, record: EpochRecord) -> float:
        """Return the number of an epoch."""
        return record.value(self.metric)

    def is_better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """Whether a value is better than another by more than some amount; any is than None, and NaN never."""
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - by if self.mode == "min" else value > than + by
