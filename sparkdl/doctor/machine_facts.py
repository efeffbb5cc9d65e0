"""Collects the facts about one machine: versions, cores, memory, GPUs, libraries.

Runs on the driver and on executors. It only collects facts, and judges nothing. Every query has a deadline. A query
that may hang or crash the process runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sparkdl.cores import usable_cores
from sparkdl.host_memory import host_memory
from sparkdl.rendezvous.hosts import FOLDER
from sparkdl.versions import package_versions

END_TIMEOUT_S = 5.0
"""Seconds that a killed program may take to end; a program that waits for a disk or a GPU may never end."""


def ask(command: Sequence[str], *, timeout_s: float) -> tuple[bool, str]:
    """Run a program; return True and its output if it ended with status 0, else False and the reason."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
    except OSError as error:
        return False, error.strerror or str(error)
    try:
        text = process.communicate(timeout=timeout_s)[0].strip()
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s:g} s"
    finally:
        _end(process)
    if process.returncode == 0:
        return True, text
    last = text.splitlines()[-1] if text else f"ended with status {process.returncode}"
    return False, last


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a program, unless it has ended; one that does not end on SIGKILL is abandoned."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    assert process.stdout is not None
    process.stdout.close()


def ask_python(code: str, *, timeout_s: float) -> tuple[bool, str]:
    """Run Python code in a process of its own; return the same as :func:`ask`."""
    return ask([sys.executable, "-c", code], timeout_s=timeout_s)


PACKAGES = ("sparkdl", "torch", "numpy", "cloudpickle", "pyspark", "pyarrow", "petastorm", "pandas", "mlflow")
"""Packages whose versions are reported."""

_NCCL = (
    "from sparkdl.collective.nccl.opening import load_nccl; n = load_nccl(); print(n.version, 'from', n.path)"
)
_MPI = "from sparkdl.collective.mpi.library import library_name; print(library_name())"
_NATIVE = "import sparkdl._native; print('loaded')"
_TORCH_CUDA = "import torch; print(torch.version.cuda or 'none')"
# Does not import torchvision: that fails if its library cannot be loaded, unless its operators were declared.
_TORCHVISION = """
import ctypes, pathlib, torch
from importlib import metadata, util
version = metadata.version('torchvision')
(folder,) = util.find_spec('torchvision').submodule_search_locations
for library in sorted(pathlib.Path(folder).glob('_C*.so')):
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise SystemExit(f'{version}, beside torch {torch.__version__}: {error}')
print(version)
"""
_GPUS = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts about one machine, as a process on it sees them.

    A pair of bool and str is the result of a query: whether it succeeded, and the answer or the reason of the failure.
    """

    host: str
    python: str
    executable: str
    packages: dict[str, str]
    """Versions by package, of those of :data:`PACKAGES` that are installed."""
    java: tuple[bool, str]
    native: tuple[bool, str]
    cores: int
    """Number of cores that the process can use, by its affinity and the quotas of its cgroups."""
    memory_bytes: int
    shm_bytes: tuple[int, int] | None
    """Size of ``/dev/shm`` and its free part, in bytes; None if there is none."""
    gpus: tuple[str, ...]
    torch_cuda: tuple[bool, str]
    """Version of CUDA that torch was built for; queried only if there are GPUs."""
    nccl: tuple[bool, str]
    mpi: tuple[bool, str]
    torchvision: tuple[bool, str] | None
    """Version of torchvision, if its C library can be loaded; None if torch or torchvision is not installed."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> MachineFacts:
        """Make the facts from the result of ``asdict``, also after a round trip through JSON."""
        kept: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**kept)


def look_around(*, timeout_s: float) -> MachineFacts:
    """Collect the facts about this machine.

    All queries run at the same time, except that torch is queried after the GPUs.

    Args:
        timeout_s: maximal seconds of each query.
    """
    with ThreadPoolExecutor(max_workers=6) as pool:
        java = pool.submit(_java, timeout_s)
        gpus = pool.submit(ask, _GPUS, timeout_s=timeout_s)
        native, nccl, mpi = (
            pool.submit(ask_python, code, timeout_s=timeout_s) for code in (_NATIVE, _NCCL, _MPI)
        )
        has_both = all(importlib.util.find_spec(package) for package in ("torch", "torchvision"))
        torchvision = pool.submit(ask_python, _TORCHVISION, timeout_s=timeout_s) if has_both else None
        has_gpus, listed = gpus.result()
        gpu_names = tuple(line.strip() for line in listed.splitlines() if line.strip()) if has_gpus else ()
        torch_cuda = ask_python(_TORCH_CUDA, timeout_s=timeout_s) if gpu_names else (False, "not asked")
        return MachineFacts(
            host=socket.gethostname(),
            python=platform.python_version(),
            executable=sys.executable,
            packages=package_versions(PACKAGES),
            java=java.result(),
            native=native.result(),
            cores=usable_cores(),
            memory_bytes=host_memory().total_bytes,
            shm_bytes=_shm_bytes(),
            gpus=gpu_names,
            torch_cuda=torch_cuda,
            nccl=nccl.result(),
            mpi=mpi.result(),
            torchvision=torchvision.result() if torchvision else None,
        )


def _java(timeout_s: float) -> tuple[bool, str]:
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else "java"
    is_there, said = ask([program, "-version"], timeout_s=timeout_s)
    version = re.search(r'version "([^"]+)"', said)
    if not is_there or version is None:
        return False, f"{program}: {said}"
    return True, f"{version[1]} at {shutil.which(program) or program}"


def _shm_bytes() -> tuple[int, int] | None:
    try:
        usage = os.statvfs(FOLDER)
    except OSError:
        return None
    return usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
