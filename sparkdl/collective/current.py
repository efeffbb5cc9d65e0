"""The communicator of this process, for code that was not handed one. Provided by whoever starts the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator

_sources: list[Callable[[], Communicator]] = []
"""Holds what gives the communicator of this process, if there is one."""


def current_communicator() -> Communicator | None:
    """The communicator over all ranks of this job, opened now if it was not yet; None outside a rank."""
    return _sources[0]() if _sources else None


def provide_communicator(open_once: Callable[[], Communicator]) -> None:
    """Have the communicator of this process opened by ``open_once`` when somebody asks for it first."""
    _sources[:] = [open_once]


def set_current_communicator(communicator: Communicator | None) -> None:
    """Make ``communicator`` the one of this process; None when it is closed."""
    _sources[:] = [] if communicator is None else [lambda: communicator]
