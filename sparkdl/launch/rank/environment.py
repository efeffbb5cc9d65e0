"""The environment variables of a rank process: which are inherited, removed and set, and the GPUs that the rank sees.

Runs in the process that starts ranks: a barrier task, or the driver for ranks of its own machine.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence

from sparkdl.collective.job import JOB_VARIABLES
from sparkdl.collective.torchrun_variables import TORCHRUN_VARIABLES
from sparkdl.cores import thread_variables
from sparkdl.errors import LaunchError

_LIBRARY, _VERSION = platform.libc_ver()
_HAS_LARGE_BLOCKS = _LIBRARY == "glibc" and tuple(map(int, _VERSION.split(".")[:2])) >= (2, 36)
"""Whether glibc may take blocks above 32 MiB from memory that it keeps; earlier ones may ignore such a threshold."""

ALLOCATOR_VARIABLES = {
    "ARROW_DEFAULT_MEMORY_POOL": "jemalloc",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30 if _HAS_LARGE_BLOCKS else 1 << 25),
}
"""Defaults of environment variables; values that the user has set take precedence.

Arrow's default, mimalloc, keeps memory that one thread decoded into and another thread freed: reading lists of 784
floats within a bound of 128 MiB took 290 to 410 MiB with it, and 220 to 300 with jemalloc, at the same speed; Arrow
itself never held more than 200. If mimalloc returns memory at once (``MIMALLOC_PURGE_DELAY=0``), reading takes a
quarter to a half more processor time.

A training step frees its activations and gradients, and the next one needs as much memory. By default glibc returns it
to the kernel, which clears every page again: steps on a CPU took 10 to 25 percent more processor time, at about the
same peak of memory. With these thresholds, in bytes, glibc keeps up to 1 GiB of freed memory (see ``man mallopt``).
"""


_SPARK_WORKER_ONLY = (
    "PYTHON_WORKER_FACTORY_PORT",
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_SOCK_PATH",
)

_LEFT_BY_LAUNCHERS = (*JOB_VARIABLES, *TORCHRUN_VARIABLES, "NODE_RANK", "PYSPARK_TORCH_DISTRIBUTOR_RDZV_ID")
"""Variables with the rank and addresses of another launcher: pyspark's TorchDistributor sets them in a Python worker
and leaves them there for later tasks, and a driver that is itself a rank has them."""

_OF_DRIVER_ONLY = ("MLFLOW_TRACKING_", "MLFLOW_AUTH_", "MLFLOW_FLASK_SERVER_SECRET_KEY", "DATABRICKS_")
"""Prefixes of variables with credentials that only the driver needs: ranks run code of many origins, and need none,
because they report to the driver."""

_NO_SECRET = ("MLFLOW_TRACKING_URI", "DATABRICKS_RUNTIME_VERSION")
"""Exceptions to these prefixes: libraries detect their platform by them. A URI with credentials is removed, too."""


def rank_environment(
    environment: Mapping[str, str],
    *,
    gpus: Sequence[str] | None,
    num_threads: int,
    inherited: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Environment variables for a rank process: the Python worker's, plus its module path and the rank's GPUs.

    Variables of MLflow's tracking and of Databricks, which may be credentials, are left out, unless the user has set
    them for the ranks.

    Args:
        environment: variables that the user set for the ranks; they take precedence over all others.
        gpus: addresses of this rank's GPUs; when empty, no GPU is visible; when None, the choice is left unchanged.
        num_threads: number of threads of the libraries that compute, unless ``environment`` has another one.
        inherited: variables to start from.
    """
    dropped = {*_SPARK_WORKER_ONLY, *_LEFT_BY_LAUNCHERS}
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in dropped and not _may_be_secret(name, value)
    }
    # Inherited numbers of threads need not be the user's: Spark and scoring tasks set them in Python workers.
    variables = {**ALLOCATOR_VARIABLES, **kept, **thread_variables(num_threads)}
    # Spark adds the files of --py-files only to sys.path. An empty entry, as in a notebook, stands for the folder.
    variables["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # Output reaches the driver line by line, not when a buffer is full.
    variables["PYTHONUNBUFFERED"] = "1"
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    variables.update(environment)
    return variables


def variables_of_programs(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that :func:`rank_environment` leaves out, but that a program started here by its user needs."""
    return {name: value for name, value in inherited.items() if _may_be_secret(name, value)}


def _may_be_secret(name: str, value: str) -> bool:
    if name in _NO_SECRET:
        return "@" in value or re.search(r"[?&](password|passwd|token)=", value, re.IGNORECASE) is not None
    return name.startswith(_OF_DRIVER_ONLY)


def gpus_of_rank(
    assigned: Sequence[str] | None, gpus_per_rank: int, position_on_host: int
) -> Sequence[str] | None:
    """Addresses of the GPUs that a rank sees; None leaves the choice unchanged.

    Args:
        assigned: GPUs that Spark assigned to the task (``spark.task.resource.gpu.amount``); None if it assigns none, as
            in local mode, so that the ranks of a host take its GPUs in turn.
        gpus_per_rank: number of GPUs that the user asked for.
        position_on_host: number of earlier ranks on the host.

    Raises:
        LaunchError: if Spark assigned fewer GPUs than were asked for.
    """
    if assigned is None:
        first = position_on_host * gpus_per_rank
        return [str(gpu) for gpu in range(first, first + gpus_per_rank)] if gpus_per_rank else None
    if len(assigned) < gpus_per_rank:
        raise LaunchError(
            f"Spark assigned {len(assigned)} GPUs to a task, but each rank was to have {gpus_per_rank}. "
            f"Set spark.task.resource.gpu.amount to {gpus_per_rank}."
        )
    return assigned
