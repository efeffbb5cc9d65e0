"""Every transport reduces, gathers and broadcasts as NumPy does, for all dtypes, ops and world sizes."""

from __future__ import annotations

from functools import cache

import pytest

from sparkdl.errors import RankError
from tests.collective.checks.numeric_checks import CHECKS, run_checks
from tests.run_ranks import run_ranks

WORLDS = {
    "shm-1": ("shm", 1, None),
    "shm-2": ("shm", 2, None),
    "shm-3": ("shm", 3, None),
    "shm-4": ("shm", 4, None),
    "tcp-2": ("tcp", 2, None),
    "tcp-3": ("tcp", 3, None),
    "two-hosts-of-1-and-2": ("native", 3, (0, 1, 1)),
    "two-hosts-of-2": ("native", 4, (0, 0, 1, 1)),
    "interleaved-hosts": ("auto", 4, (0, 1, 0, 1)),
    "mpi-1": ("mpi", 1, None),
    "mpi-2": ("mpi", 2, None),
    "mpi-3": ("mpi", 3, None),
}


@cache
def outcomes(world: str) -> list[dict[str, str | None]] | Exception:
    """The outcomes of all checks on each rank, or the failure of the world, which is found once for all checks."""
    transport, world_size, host_of_rank = WORLDS[world]
    try:
        return run_ranks(world_size, run_checks, host_of_rank, transport=transport)
    except (RankError, TimeoutError) as error:
        return error


# Three ranks cover all that two do, and random programs run on two ranks and on three hosts with two, one and one.
# test_mpiexec.py has the same checks on three ranks with Open MPI, and test_programs.py two ranks with MPICH.
SLOW = ("shm-2", "shm-4", "tcp-2", "mpi-2", "mpi-3", "two-hosts-of-1-and-2", "interleaved-hosts")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "world", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WORLDS]
)
def test_transport_agrees_with_numpy(world: str, check: str) -> None:
    found = outcomes(world)
    if isinstance(found, Exception):
        raise found
    for rank, outcome in enumerate(found):
        assert check in outcome, f"rank {rank} did not come so far: {list(outcome.items())[-1]}"
        assert outcome[check] is None, f"rank {rank}: {outcome[check]}"
