"""The communicator of this process, for code that was not handed one. Set by whoever starts the rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator

_opened: list[Communicator] = []
"""Holds the communicator of this process, if any."""


def current_communicator() -> Communicator | None:
    """The communicator that the launcher opened for this rank; None outside a rank."""
    return _opened[0] if _opened else None


def set_current_communicator(communicator: Communicator | None) -> None:
    """Make ``communicator`` the one of this process; None when it is closed."""
    _opened[:] = [] if communicator is None else [communicator]
