"""What an asynchronous operation of a communicator returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Handle(Protocol):
    """An operation under way; it keeps its buffers alive until it is complete."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the operation is complete.

        Args:
            timeout_s: seconds to wait at most; the operation's own deadline when None.

        Raises:
            CommunicatorError: what the operation failed with.
        """

    def done(self) -> bool:
        """Say at once whether the operation is complete, well or not."""


class MessageHandle(Handle, Protocol):
    """A message under way.

    Attributes:
        source: the rank that sends it; for a message from any rank, -1 until it comes.
    """

    source: int

    def when_done(self, action: Callable[[], None]) -> None:
        """Call something, on any thread, as soon as the message is complete, well or not; it must return at once."""
