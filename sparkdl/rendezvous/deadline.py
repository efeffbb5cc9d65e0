"""One point in time that several waits share, so that their sum stays within what the caller allowed."""

from __future__ import annotations

import time
from datetime import timedelta

from sparkdl.errors import ParamError

MAX_TIMEOUT_S = 2e6
"""About three weeks, the longest wait of the system calls."""


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Return ``timeout_s``.

    Raises:
        ParamError: if it is not positive, not a number, or longer than :data:`MAX_TIMEOUT_S`.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ParamError(
            f"{name} must be a positive number of seconds, at most {MAX_TIMEOUT_S:.0f}; got {timeout_s:g}"
        )
    return timeout_s


def to_seconds(timeout: timedelta) -> float:
    """The seconds of another library's timeout, :data:`MAX_TIMEOUT_S` at most.

    Scripts that want no timeout pass years, such as ``ddp_timeout=180000000``.
    """
    return min(timeout.total_seconds(), MAX_TIMEOUT_S)


class Deadline:
    """A point in time ``timeout_s`` seconds from its creation, on the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the point in time has passed."""
        return time.monotonic() >= self._end

    def at_most(self, timeout_s: float) -> Deadline:
        """A deadline that ends after ``timeout_s`` seconds, or with this one if that is earlier."""
        return Deadline(min(timeout_s, self.remaining_s()))
