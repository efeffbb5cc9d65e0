"""One point in time that several waits share, so that their sum stays within the caller's timeout.

Collectives of the native core have their own: native/include/sparkdl/deadline.h.
"""

from __future__ import annotations

import time
from datetime import timedelta
from numbers import Real

from sparkdl.errors import ParamError

MAX_TIMEOUT_S = 2e6
"""Longest timeout, about three weeks: system calls cannot wait longer."""


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Return ``timeout_s``.

    Raises:
        ParamError: if it is not positive, not a number, or longer than :data:`MAX_TIMEOUT_S`.
    """
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ParamError(
            f"{name} must be a positive number of seconds, at most {MAX_TIMEOUT_S:.0f}; got {timeout_s!r}"
        )
    return timeout_s


def to_seconds(timeout: timedelta) -> float:
    """Convert another library's timeout to seconds, :data:`MAX_TIMEOUT_S` at most.

    Scripts that need no timeout pass years, such as ``ddp_timeout=180000000``.
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
