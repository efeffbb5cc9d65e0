"""The communicator of this process, so that code which was not handed one can find it. Set by whoever starts the rank."""

from __future__ import annotations

from sparkdl.collective.communicator import Communicator

_current: Communicator | None = None


def current_communicator() -> Communicator | None:
    """The communicator that the launcher opened for this rank; None outside a rank."""
    return _current


def set_current_communicator(communicator: Communicator | None) -> None:
    """Make ``communicator`` the one of this process; None when it is closed."""
    global _current
    _current = communicator
