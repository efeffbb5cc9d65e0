"""What an asynchronous operation of a communicator returns."""

from __future__ import annotations

from typing import Protocol


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
