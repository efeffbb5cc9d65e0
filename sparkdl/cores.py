"""The cores that a process may use, and from them the number of threads of a rank or task. Standard library only.

Libraries start a thread per core of the machine, and then several ranks, or a rank and other programs, compete for the
same cores: with OpenMP, whose threads wait in loops, a step takes up to a hundred times as long. So each rank and each
task that scores rows has the threads of its slot: ``spark.task.cpus``, or its share of the machine without Spark.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

THREADS = "OMP_NUM_THREADS"
"""Variable with the number of threads of torch, BLAS libraries and Arrow's pool; a user's value takes precedence."""

_THREADS_OF_TOKENIZERS = "RAYON_NUM_THREADS"


def usable_cores(process: Path = Path("/proc/self")) -> int:
    """Number of cores that a process can use: those of its affinity, at most the quotas of its cgroups; at least 1.

    Args:
        process: folder in ``/proc`` of the process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas(process))]))


def threads_of_local_rank(num_ranks: int) -> int:
    """Number of threads of each of a machine's ranks: ``OMP_NUM_THREADS``, or its share of the cores, at least 1."""
    return chosen_threads(os.environ) or max(1, usable_cores() // num_ranks)


def threads_of_task(num_threads: int | None, cpus: int, cores: int | None = None) -> int:
    """Number of threads of a Spark task, or of its rank.

    Args:
        num_threads: number that the user chose; None if the user chose none.
        cpus: number of cores that Spark reserves for the task.
        cores: number of cores that the task's process can use; None for those of this process.
    """
    return num_threads or max(1, min(cpus, cores or usable_cores()))


def chosen_threads(environment: Mapping[str, str]) -> int | None:
    """Number of threads by ``OMP_NUM_THREADS``, which may be a list with a number per level; None if it holds none."""
    first = environment.get(THREADS, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def thread_variables(num_threads: int) -> dict[str, str]:
    """Environment variables that limit the threads of libraries in a process that is yet to import them."""
    return dict.fromkeys((THREADS, _THREADS_OF_TOKENIZERS), str(num_threads))


def _quotas(process: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of a process's cgroups and of those that contain them; cgroups v1 and v2."""
    try:
        groups = (process / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (process / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    path_of = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            path_of["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
    for line in mounts:
        mount, _, after = line.partition(" - ")
        root, folder = mount.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind not in path_of or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        of_process, top = path_of[kind], Path(folder)
        # In a container the path may be the host's, and only the container's own cgroup is mounted.
        inside = of_process.relative_to(root) if of_process.is_relative_to(root) else "."
        group = top / inside
        for ancestor in (group, *group.parents):
            if ancestor.is_relative_to(top):
                yield from _quota(ancestor)


def _quota(group: Path) -> Iterator[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        if quota != "max" and int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError):
        pass  # a cgroup without a quota, such as the root
