"""Ranks that find each other by the variables of ``torchrun``: those that it started itself, and ours.

Runs on the *rank*. Ranks of ``torchrun``, or of anything else that sets its variables, exchange the job's secret
through torch's store: it is as safe as that store. Ranks of ours have the same variables, and torch's ``env://`` leads
them, as does ``tcp://`` with the same address, to a store whose keys lie at our coordinator, which serves holders of
the job's secret alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

from torch.distributed.rendezvous import (
    _env_rendezvous_handler,
    _file_rendezvous_handler,
    _rendezvous_handlers,
    _tcp_rendezvous_handler,
    rendezvous,
)

from sparkdl.collective import PrefixRendezvous
from sparkdl.collective.addresses import LOOPBACK, hosts_of_name, reachable_hosts
from sparkdl.collective.current import current_job, job_rendezvous
from sparkdl.collective.deadline import to_seconds
from sparkdl.collective.job import find_all, is_own_run, is_torchruns
from sparkdl.collective.membership import host_job
from sparkdl.collective.mpi_launch import find_mpi_world
from sparkdl.errors import SparkdlError
from sparkdl.torch.store import RendezvousStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from sparkdl.collective import Communicator
    from sparkdl.collective.job import Job

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEET_TIMEOUT = timedelta(seconds=300)
_KEY = "sparkdl/invitation"

# The store of rank 0 serves the others as long as it lives.
_stores: list[Store] = []

_met = [False]
"""Whether this rank was asked for a store."""


class JobStore(RendezvousStore):
    """The store that ``env://``, or ``tcp://`` and the coordinator's address, gives in a rank of ours.

    Attributes:
        job: the job at whose coordinator its keys lie.
    """

    def __init__(self, job: Job, rank: int, world_size: int, *, timeout_s: float) -> None:
        everyones = job_rendezvous(job)
        # torch numbers its groups from zero again after destroy_process_group; the ranks initialize equally often.
        count = everyones.add(f"torchrun/stores/{rank}/{world_size}", 1)
        super().__init__(PrefixRendezvous(everyones, f"torchrun/{world_size}/{count}"), timeout_s=timeout_s)
        self.job = job


def find_torchrun(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    """What opens the communicator of the ranks that ``torchrun`` started together with this one; None without it.

    Raises:
        LaunchError: if variables are missing that it sets.
    """
    if is_own_run(environ):
        return None  # a rank of ours finds its own job; what a rank of a Runner has started is no rank
    if not is_torchruns(environ) and find_mpi_world(environ) is not None:
        return None  # scripts for mpiexec set some of these for torch
    found = find_all(environ, _VARIABLES, "Start ranks by torchrun, which sets all of them.")
    return None if found is None else partial(_open, environ)


def register_rendezvous() -> None:
    """Have torch's rendezvous ask the functions below. Doing it again changes nothing."""
    # torch refuses to register a second handler of a scheme.
    _rendezvous_handlers.update(HANDLERS)


def rendezvous_by_environment(
    url: str, timeout: timedelta = _MEET_TIMEOUT, **kwargs: Any
) -> Iterator[tuple[Store, int, int]]:
    """Handle torch's ``env://``: a :class:`JobStore` in a rank whose ``MASTER_ADDR`` and ``MASTER_PORT`` are ours.

    Elsewhere, and where a program has set another address, torch's own handler does its work.
    """
    job = current_job()
    if job is None or not job.is_named_by(os.environ):
        if job is not None:
            _note_elsewhere(job)
        yield from _env_rendezvous_handler(url, timeout=timeout, **kwargs)
        return
    given = dict(parse_qsl(urlparse(url).query))
    rank = int(given.get("rank") or os.environ.get("RANK") or job.rank)
    world_size = int(given.get("world_size") or os.environ.get("WORLD_SIZE") or job.world_size)
    yield _job_store(job, rank, world_size, timeout), rank, world_size


def rendezvous_by_address(
    url: str, timeout: timedelta = _MEET_TIMEOUT, **kwargs: Any
) -> Iterator[tuple[Store, int, int]]:
    """Handle torch's ``tcp://``: a :class:`JobStore` where the address is that of ``MASTER_ADDR`` and ``MASTER_PORT``.

    Elsewhere torch's own handler does its work.
    """
    job, parts = current_job(), urlparse(url)
    given = dict(parse_qsl(parts.query))
    if job is None or not job.is_at(parts.hostname, parts.port) or not {"rank", "world_size"} <= given.keys():
        if job is not None:
            _note_elsewhere(job)
        yield from _tcp_rendezvous_handler(url, timeout=timeout, **kwargs)
        return
    rank, world_size = int(given["rank"]), int(given["world_size"])
    yield _job_store(job, rank, world_size, timeout), rank, world_size


def rendezvous_by_file(url: str, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
    """Handle torch's ``file://``, as its own handler does."""
    job = current_job()
    if job is not None:
        _note_elsewhere(job)
    yield from _file_rendezvous_handler(url, **kwargs)


HANDLERS = {
    "env": rendezvous_by_environment,
    "tcp": rendezvous_by_address,
    "file": rendezvous_by_file,
}
"""By the schemes of torch's URLs."""


def _job_store(job: Job, rank: int, world_size: int, timeout: timedelta) -> JobStore:
    _met[0] = True
    store = JobStore(job, rank, world_size, timeout_s=to_seconds(timeout))
    _stores.append(store)  # C++ keeps only its half
    return store


def has_met() -> bool:
    """Whether torch.distributed of this rank has looked for the others."""
    return _met[0]


def job_of(store: Any) -> Job | None:
    """The job at whose coordinator the keys of a store lie; None if it is none of ours."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.job if isinstance(store, JobStore) else None


def _note_elsewhere(job: Job) -> None:
    """Have the launcher know that the ranks meet at an address of the program's own."""
    _met[0] = True
    if is_own_run(os.environ):
        with suppress(SparkdlError, ConnectionError):  # what comes now goes without our coordinator
            job_rendezvous(job)


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
