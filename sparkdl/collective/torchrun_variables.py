"""Environment variables of ``torchrun``, for the ranks of sparkdl, of ``torchrun`` itself, and of SLURM.

Every rank of sparkdl has them in addition to sparkdl's own variables, so that programs that read ``RANK``,
``LOCAL_RANK`` or ``MASTER_ADDR`` need no change. :mod:`sparkdl.torch.registration` opens communicators in processes
that ``torchrun`` started.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sparkdl.collective.job import RankJob
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
"""Variables that describe the position of a rank; set by ``torchrun`` and by :func:`torchrun_variables`."""

_SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)
_SLURM_PORTS = range(10_000, 30_000)
"""Ports of rank 0 in SLURM's jobs; systems choose ports by themselves from above this range."""

_OWN_RUN = re.compile(r"sparkdl:\d+")
"""The run ids of sparkdl's jobs; users choose those of ``torchrun``, such as ``sparkdl-7``."""


def torchrun_variables(
    job: RankJob, topology: Topology, *, is_alone: bool = False, restart_count: int = 0, max_restarts: int = 0
) -> dict[str, str]:
    """Return the environment variables of a rank of a job as ``torchrun`` sets them.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are the address of the coordinator, which serves only clients that have the
    job's secret: torch connects to it through :func:`sparkdl.torch.registration.meet`.

    Args:
        job: job of the rank, with the rank's number.
        topology: which ranks share a host.
        is_alone: whether the rank sees only its own GPUs, as if it were the only rank on its host.
        restart_count: how often the ranks have been restarted.
        max_restarts: how often the ranks may be restarted.
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
        f"sparkdl:{job.coordinator.port}",
        restart_count,
        max_restarts,
        # If a program sets another MASTER_PORT, its rank 0 has to serve the store there.
        False,
    )
    return dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True))


def export_torchrun_variables(
    job: RankJob, topology: Topology, *, is_alone: bool = False, restart_count: int = 0, max_restarts: int = 0
) -> None:
    """Set the variables of :func:`torchrun_variables` in this process; the arguments are the same.

    MASTER_ADDR and MASTER_PORT stay as the user has set them.
    """
    variables = torchrun_variables(
        job, topology, is_alone=is_alone, restart_count=restart_count, max_restarts=max_restarts
    )
    if topology.num_hosts == 1:
        # By default Gloo listens on the interface that the host name leads to, and there may be none.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.setdefault(name, variables.pop(name))
    os.environ.update(variables)


_OF_ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


_trials: list[dict[str, str | None]] = []
"""For each trial that runs, the variables before the first one began."""

_lock = threading.Lock()


@contextmanager
def as_single_rank() -> Iterator[None]:
    """In this context the variables are those of the only rank of a job, for code of ranks that the driver tries.

    Trials may run in any number of threads; the last one restores the variables.
    """
    with _lock:
        _trials.append(_trials[0] if _trials else {name: os.environ.get(name) for name in _OF_ONE_RANK})
        os.environ.update(_OF_ONE_RANK)
    try:
        yield
    finally:
        with _lock:
            before = _trials.pop()
            for name, value in before.items() if not _trials else ():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def variables_of_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``torchrun`` for a task of SLURM's ``srun``; empty if it is not a task, or the only one.

    Rank 0 is on the first host of the step. Its port follows from the job's id, so that jobs on one host differ, unless
    ``MASTER_PORT`` is set.

    Raises:
        LaunchError: if some of SLURM's variables are missing.
    """
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks == "1" or "SLURM_PROCID" not in environ:
        return {}
    missing = [name for name in _SLURM_VARIABLES if name not in environ]
    if missing:
        raise LaunchError(f"This is a task of SLURM, and {', '.join(missing)} is not set. Start it by srun.")
    job, step, rank, local_rank, host, nodes, counts = (environ[name] for name in _SLURM_VARIABLES)
    # Such as 2(x3),1: three hosts with two tasks, then one with one.
    tasks = [
        count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))
    ]
    # Such as gpu[03-05,9],big1: the first number of brackets belongs to the first host.
    first_host = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]
    values = (
        rank,
        num_tasks,
        local_rank,
        tasks[int(host)],
        host,
        len(tasks),
        rank,
        num_tasks,
        "default",
        environ.get("MASTER_ADDR") or first_host,
        environ.get("MASTER_PORT") or _SLURM_PORTS[(int(job) + 97 * int(step)) % len(_SLURM_PORTS)],
        f"slurm-{job}.{step}",
        0,
        0,
        False,
    )
    return dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True))


def is_torchruns(environ: Mapping[str, str]) -> bool:
    """Whether ``torchrun`` itself set its variables."""
    run_id = environ.get(TORCHRUN_RUN_ID)
    return bool(run_id) and not is_own_run(environ)


def is_own_run(environ: Mapping[str, str]) -> bool:
    """Whether sparkdl set the variables of ``torchrun``, for one of its ranks."""
    return _OWN_RUN.fullmatch(environ.get(TORCHRUN_RUN_ID, "")) is not None
