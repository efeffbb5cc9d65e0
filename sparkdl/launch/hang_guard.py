"""Watches over the ranks of one launch, and ends them where one hangs. Runs on the driver."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from sparkdl.launch.driver_channel import DriverChannel
from sparkdl.launch.failure_board import FAREWELL_TIMEOUT_S
from sparkdl.launch.hang_report import hang_error
from sparkdl.launch.hang_watch import Hang, HangLimits, HangWatch
from sparkdl.launch.outcome import Failure, StopReason
from sparkdl.launch.rank_signs import RankSigns

END_TIMEOUT_S = 15.0
"""How long the tasks may take to tell where their ranks were and to end; one that stands still itself never does."""

END_AFTER_FAILURE_TIMEOUT_S = FAREWELL_TIMEOUT_S + END_TIMEOUT_S
"""How long the tasks may take to end once code on a rank has raised: that rank's may wait for the others first."""


class HangGuard:
    """One for each launch.

    Args:
        channel: by which the tasks are heard, and told to end.
        limits: from when on a rank counts as hanging.
    """

    def __init__(self, channel: DriverChannel, limits: HangLimits) -> None:
        self._channel = channel
        self._watch = HangWatch(limits)
        self._found: tuple[Hang, dict[int, RankSigns]] | None = None
        self._end_by = math.inf
        self._has_failed = False

    @property
    def is_overdue(self) -> bool:
        """Whether all tasks were to end, as a rank hangs or failed, and have not done so in time."""
        return time.monotonic() >= self._end_by

    def look(self) -> None:
        """Look whether a rank hangs, and have all tasks end if one does. To be called often."""
        if self._found is not None:
            return
        if not self._has_failed and _are_explained(self._channel.failures):
            self._has_failed = True
            self._end_by = time.monotonic() + END_AFTER_FAILURE_TIMEOUT_S
        now, heard = time.monotonic(), self._channel.signs
        hang = self._watch.look(now, heard)
        if hang is None:
            return
        self._found = hang, {rank: signs for rank, (_, _, signs) in heard.items()}
        self._end_by = min(self._end_by, now + END_TIMEOUT_S)
        self._channel.cancel(StopReason(hang.why, is_hang=True))

    def check(self) -> None:
        """Raise what was found, once the tasks have ended or are overdue.

        Raises:
            HangError: naming the rank; where all ranks were is logged, too.
        """
        failures = self._channel.failures
        if self._found is None or _are_explained(failures):
            return
        hang, signs = self._found
        raise hang_error(hang, failures, signs, self._channel.hosts)


def _are_explained(failures: Sequence[Failure]) -> bool:
    """Whether code on a rank raised, which is why the others end or wait."""
    return any(not failure.is_consequence and not failure.is_loss for failure in failures)
