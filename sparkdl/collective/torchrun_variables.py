"""The environment variables of ``torchrun``: set for the ranks of our jobs, and distinguished from ``torchrun``'s own.

Each rank of ours has them beside its own variables, so that programs that read ``RANK``, ``LOCAL_RANK`` or
``MASTER_ADDR`` need no change. :mod:`sparkdl.torch.registration` opens communicators where ``torchrun`` set them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.collective.job import Job
    from sparkdl.topology import Topology

TORCHRUN_RUN_ID = "TORCHELASTIC_RUN_ID"

TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    TORCHRUN_RUN_ID,
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What ``torchrun`` sets for a rank about its position, and :func:`torchrun_variables` too."""

_OWN_RUN = "sparkdl-"
"""How the run ids of our jobs begin, which distinguishes them from those of ``torchrun``."""


def torchrun_variables(
    job: Job, topology: Topology, *, is_alone: bool = False, restart_count: int = 0, max_restarts: int = 0
) -> dict[str, str]:
    """Return the environment variables of a rank of a job as ``torchrun`` sets them.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are those of the coordinator, which serves holders of the job's secret
    alone: torch reaches it by :func:`sparkdl.torch.registration.rendezvous_by_environment`.

    Args:
        job: of the rank.
        topology: which ranks share a host.
        is_alone: the rank sees none of what its host has but its own GPUs, as if it had the host to itself.
        restart_count: how often the ranks have been started again.
        max_restarts: how often they may be.
    """
    host, num_hosts = (job.rank, job.world_size) if is_alone else (topology.host, topology.num_hosts)
    values = (
        job.rank,
        job.world_size,
        0 if is_alone else topology.local_rank,
        1 if is_alone else topology.local_size,
        host,
        num_hosts,
        job.rank,
        job.world_size,
        "default",
        job.coordinator.hosts[0],
        job.coordinator.port,
        f"{_OWN_RUN}{job.coordinator.port}",
        restart_count,
        max_restarts,
        # Where a program names another MASTER_PORT, its rank 0 has to serve the store there.
        False,
    )
    return dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True))


def names_job(environ: Mapping[str, str], job: Job) -> bool:
    """Whether ``MASTER_ADDR`` and ``MASTER_PORT`` are those of a job's coordinator."""
    return job.is_at(environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"))


def is_torchruns(environ: Mapping[str, str]) -> bool:
    """Whether ``torchrun`` itself set its variables."""
    run_id = environ.get(TORCHRUN_RUN_ID)
    return bool(run_id) and not is_own_run(environ)


def is_own_run(environ: Mapping[str, str]) -> bool:
    """Whether the variables of ``torchrun`` are there because a rank of ours has them."""
    return environ.get(TORCHRUN_RUN_ID, "").startswith(_OWN_RUN)
