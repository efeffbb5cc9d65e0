"""Ranks that ``torchrun`` started, or anybody who sets its variables: they find each other through torch's store.

Runs on the *rank*. What the store's users can read, they can use: the job's secret is as safe as that store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.rendezvous import rendezvous

from sparkdl.collective.addresses import LOOPBACK, hosts_of_name, reachable_hosts
from sparkdl.collective.job import find_all
from sparkdl.collective.membership import host_job
from sparkdl.collective.mpi_launch import find_mpi_world

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from sparkdl.collective import Communicator

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEET_TIMEOUT = timedelta(seconds=300)
_KEY = "sparkdl/invitation"

# The store of rank 0 serves the others as long as it lives.
_stores: list[Store] = []


def find_torchrun(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    """What opens the communicator of the ranks that ``torchrun`` started together with this one; None without it.

    Raises:
        LaunchError: if variables are missing that it sets.
    """
    if not environ.get("TORCHELASTIC_RUN_ID") and find_mpi_world(environ) is not None:
        return None  # scripts for mpiexec set some of these for torch
    found = find_all(environ, _VARIABLES, "Start ranks by torchrun, which sets all of them.")
    return None if found is None else partial(_open, environ)


def _open(environ: Mapping[str, str]) -> Communicator:
    store, rank, world_size = next(iter(rendezvous("env://", timeout=_MEET_TIMEOUT)))
    _stores.append(store)

    def spread(invitation: bytes) -> bytes:
        if rank == 0:
            store.set(_KEY, invitation)
        return bytes(store.get(_KEY))

    return host_job(rank, world_size, spread, environ, host=_where_rank_0_is_reached(environ, world_size))


def _where_rank_0_is_reached(environ: Mapping[str, str], world_size: int) -> Sequence[str]:
    """On rank 0: the addresses of this machine at which the other ranks find its coordinator."""
    if environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        return [LOOPBACK]
    # The others reach the store there, too.
    return reachable_hosts(hosts_of_name(environ["MASTER_ADDR"]))
