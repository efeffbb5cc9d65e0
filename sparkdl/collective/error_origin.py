"""Origin of an error that a rank raised: the rank's own code, or the failure of another rank.

Launchers report the failure that caused the others, and elastic training continues after failures in which a rank was
lost.
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
    """Origin of an error that a rank raised."""

    OWN = "own"
    """The code that this rank ran."""
    SHARED = "shared"
    """An operation of all ranks: they disagree about it, and all of them raise the error."""
    ABORTED = "aborted"
    """Another rank, which aborted or left the communicator."""
    LATE = "late"
    """Another rank, which did not take part in time."""
    LOST = "lost"
    """Another rank, which died or cannot be reached any more."""


def origin_of(error: BaseException | None) -> Origin:
    """Determine the origin of an error from the chain of errors that it was raised from."""
    seen: set[int] = set()
    is_shared = is_own = False
    while error is not None and id(error) not in seen:
        if isinstance(error, RankLostError):
            return Origin.LOST
        if isinstance(error, CommunicatorTimeoutError):
            return Origin.LATE
        if isinstance(error, CommunicatorAbortedError) or type(error) is CommunicatorError:
            return Origin.ABORTED
        # Other errors, such as Horovod's, say that a collective failed; the errors they were raised from decide.
        is_shared |= isinstance(error, CommunicatorError)
        is_own |= not isinstance(error, CommunicatorError)
        seen.add(id(error))
        # What an agreed error was raised from happened on this rank, also if a collective failed there.
        error = None if getattr(error, "is_agreed", False) else error.__cause__ or error.__context__
    return Origin.SHARED if is_shared and not is_own else Origin.OWN


def is_consequence(error: BaseException | None) -> bool:
    """Whether an error was caused by the failure of another rank."""
    return origin_of(error) in (Origin.ABORTED, Origin.LATE, Origin.LOST)
