"""How a process that was not told finds out which job it is a rank of: by its environment variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.collective.job import Job, is_torchruns
from sparkdl.collective.membership import join_job
from sparkdl.collective.mpi_launch import find_mpi_world
from sparkdl.errors import LaunchError

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator

Finder = Callable[[Mapping[str, str]], "Callable[[], Communicator] | None"]
"""Reads environment variables; gives what opens the communicator of all ranks, or None if it knows nothing of them."""

_added: list[Finder] = []


def add_finder(finder: Finder) -> None:
    """Have another launcher's variables understood, too. Doing it again changes nothing."""
    if finder not in _added:
        _added.append(finder)


def find_job(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    """What opens the communicator of the job that a launcher made this process a rank of; None if none did.

    ``sparkdl run`` comes first, ``mpiexec`` last: what it set is inherited by all that its processes start.

    Raises:
        LaunchError: if a launcher's variables are there only in part; the message names the missing ones.
    """
    for finder in (_find_own, *_added, find_mpi_world):
        opener = finder(environ)
        if opener is not None:
            return opener
    return None


def find_own_job(environ: Mapping[str, str]) -> Job | None:
    """The job that ``sparkdl run`` made this process a rank of; None if it did not.

    Raises:
        LaunchError: if some of its variables are missing; the message names them.
    """
    if is_torchruns(environ):
        return None  # inside a rank of ours it has started ranks of its own, which inherit our variables
    return Job.from_variables(environ)


def _find_own(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    if not _added and is_torchruns(environ):
        raise LaunchError(
            "torchrun started this process: import sparkdl.torch, which knows torchrun's variables."
        )
    job = find_own_job(environ)
    return None if job is None else partial(join_job, job)
