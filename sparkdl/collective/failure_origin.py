"""Where an error began that a rank raised: in its own code, or on another rank, whose failure it reports.

Runs on ranks. Launchers name the failure that the others follow from, and elastic training continues after those that
lost a rank.
"""

from __future__ import annotations

from enum import Enum

from sparkdl.errors import (
    CommunicatorAbortedError,
    CommunicatorError,
    CommunicatorTimeoutError,
    RankLostError,
)


class Origin(Enum):
    """Where an error that a rank raised began."""

    OWN = "own"
    """In what this rank ran."""
    SHARED = "shared"
    """In what the ranks run together: they disagree about an operation, and all of them raise it."""
    ABORTED = "aborted"
    """On another rank, which ended the communicator or left it."""
    LATE = "late"
    """On another rank, which did not take part in time."""
    LOST = "lost"
    """On another rank, which died or cannot be reached any more."""


def origin_of(error: BaseException | None) -> Origin:
    """Find where an error began, by the errors that it was raised from."""
    seen: set[int] = set()
    is_shared = is_own = False
    while error is not None and id(error) not in seen:
        if isinstance(error, RankLostError):
            return Origin.LOST
        if isinstance(error, CommunicatorTimeoutError):
            return Origin.LATE
        if isinstance(error, CommunicatorAbortedError) or type(error) is CommunicatorError:
            return Origin.ABORTED
        # Others, as Horovod's, say that a collective failed, and stand for what they were raised from.
        is_shared |= isinstance(error, CommunicatorError)
        is_own |= not isinstance(error, CommunicatorError)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return Origin.SHARED if is_shared and not is_own else Origin.OWN


def is_consequence(error: BaseException | None) -> bool:
    """Whether another rank's failure is behind an error."""
    return origin_of(error) in (Origin.ABORTED, Origin.LATE, Origin.LOST)
