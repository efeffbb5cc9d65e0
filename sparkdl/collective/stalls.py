"""The stall inspector: says which ranks have not joined an operation that others have been waiting in for long.

Runs on ranks. Who waits finds out who is missing and logs a warning, again and again; the operation goes on, unless it
was to be given up after some time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkdl.errors import ParamError
from sparkdl.topology import name_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StallCheck:
    """When an operation that some ranks do not join is reported, and given up.

    Attributes:
        warn_after_s: seconds without progress until a warning, and between warnings; None for never.
        abort_after_s: seconds without progress until the operation fails; None for its deadline alone.
    """

    warn_after_s: float | None = 60.0
    abort_after_s: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if seconds is not None and not seconds > 0:
                raise ParamError(f"{name} must be positive or None, got {seconds}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> StallCheck:
        """What the variables ask for that Horovod has for this, with its defaults.

        They are ``HOROVOD_STALL_CHECK_DISABLE``, ``HOROVOD_STALL_CHECK_TIME_SECONDS`` and
        ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, of which 0 stands for never.

        Raises:
            ParamError: if one of them is no number, or the time to the check is not positive.
        """
        if _number(environment, "HOROVOD_STALL_CHECK_DISABLE", 0.0) > 0:
            return cls(warn_after_s=None)
        return cls(
            warn_after_s=_number(environment, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
            abort_after_s=_number(environment, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or None,
        )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        return float(text) if text else default
    except ValueError as error:
        raise ParamError(f"{name} must be a number, got {text!r}") from error


class StallTimer:
    """For transports in Python: runs while an operation makes no progress."""

    def __init__(self, check: StallCheck) -> None:
        self._check = check
        self._began = time.monotonic()
        self._num_warnings = 0

    @property
    def waited_s(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self._began

    @property
    def warning_is_due(self) -> bool:
        """Whether it is time for a warning; says so once for each."""
        after_s = self._check.warn_after_s
        if after_s is None or self.waited_s < after_s * (self._num_warnings + 1):
            return False
        self._num_warnings += 1
        return True

    @property
    def is_over(self) -> bool:
        """Whether the operation has to be given up."""
        after_s = self._check.abort_after_s
        return after_s is not None and self.waited_s >= after_s


def numbered(name: str, world_ranks: Sequence[int]) -> str:
    """What a warning calls a communicator by whose own numbers it names ranks.

    Args:
        name: of the communicator.
        world_ranks: its ranks, by their numbers in the world.
    """
    if list(world_ranks) == list(range(len(world_ranks))):
        return repr(name)
    own = name_ranks(range(len(world_ranks)))
    return f"{name!r} (its {own} are {', '.join(map(str, world_ranks))} of the world)"


def warn_of_stall(communicator: str, rank: int, operation: str, waited_s: float, who: str) -> None:
    """Log that a rank has waited long.

    Args:
        communicator: what to call it.
        rank: that waits.
        operation: that it waits in.
        waited_s: for how long.
        who: is missing, in words.
    """
    logger.warning(
        "Rank %d has waited %.3g s in %s on %s: %s. Look at what those ranks are doing: all ranks have to call the"
        " same operations in the same order.",
        rank,
        waited_s,
        operation,
        communicator,
        who,
    )
