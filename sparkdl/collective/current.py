"""The communicator of this process, for code that was not handed one: provided by a launcher, or found."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkdl.collective.discovery import find_job

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator

_sources: list[Callable[[], Communicator]] = []
"""Holds what gives the communicator of this process, if there is one."""

_lock = threading.RLock()


def current_communicator() -> Communicator | None:
    """The communicator over all ranks of this job, opened now if it was not yet; None outside a rank.

    A process that ``sparkdl run``, ``mpiexec`` or, where :mod:`sparkdl.torch` is imported, ``torchrun`` started finds
    the others by its environment variables; all of them have to ask. It leaves the job when it ends.

    Raises:
        LaunchError: if a launcher's variables are there only in part; the message names the missing ones.
    """
    with _lock:
        if not _sources:
            find = find_job(os.environ)
            if find is None:
                return None
            set_current_communicator(find())
        return _sources[0]()


def provided_communicator() -> Communicator | None:
    """The current communicator, if there is one without looking for other ranks."""
    return _sources[0]() if _sources else None


def provide_communicator(open_once: Callable[[], Communicator]) -> None:
    """Have the communicator of this process opened by ``open_once`` when somebody asks for it first."""
    _sources[:] = [open_once]


def set_current_communicator(communicator: Communicator | None) -> None:
    """Make ``communicator`` the one of this process; None when it is closed."""
    _sources[:] = [] if communicator is None else [lambda: communicator]
