"""What a benchmark ran on. Names no host and no user."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparkdl import __version__

_PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "horovod", "pyspark", "petastorm", "pyarrow")


def describe_machine() -> dict[str, object]:
    """Cores that this process may use, memory, processor, GPU, and the versions of what is compared."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "processor": _processor(),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "versions": {
            "sparkdl": __version__,
            **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607  # found where the user has it
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(answer.stdout.split("\n")).strip(", ") or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
