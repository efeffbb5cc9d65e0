"""Why a message failed, in the words of the communicator that it belongs to. Runs on ranks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sparkdl.collective.deadline import Deadline
from sparkdl.errors import (
    CommunicatorAbortedError,
    CommunicatorError,
    CommunicatorTimeoutError,
    RankLostError,
)

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.pending_message import PendingMessage

NEWS_S = 3.0
"""How long the communicator may take to learn by itself why a link failed."""

_LOOK_S = 0.02
"""Between two looks at whether it has learned: a communicator tells only those who wait in an operation of it."""


def explain(
    message: PendingMessage, error: Exception, parent: Communicator | None, parent_name: str
) -> CommunicatorError:
    """Say what went wrong with a message; its communicator can be used no further either.

    Args:
        message: which failed.
        error: of the link that it should have travelled on.
        parent: the communicator, if it is still there.
        parent_name: its name.
    """
    what = f"{message.what} on {parent_name!r}"
    late = isinstance(error, CommunicatorTimeoutError)
    if late:
        error = message.late(parent_name)
    if parent is None:
        return CommunicatorError(f"{what} failed: {error}")
    is_news = isinstance(error, RankLostError | CommunicatorAbortedError)
    if _failed_by_itself(parent, NEWS_S if is_news else 0.0):
        try:
            parent.barrier()  # refused with what the parent failed with
        except CommunicatorError as failure:
            return type(failure)(f"{message.what}: {failure}")
    reason = str(error) if late else f"{what} failed: {error}"
    parent.abort(reason)
    if late:
        return CommunicatorTimeoutError(reason)
    return RankLostError(reason) if isinstance(error, RankLostError) else CommunicatorError(reason)


def _failed_by_itself(communicator: Communicator, timeout_s: float) -> bool:
    deadline = Deadline(timeout_s)
    pause = threading.Event()
    while communicator.failure is None and not deadline.expired:
        pause.wait(_LOOK_S)
    return communicator.failure is not None
