"""The containment on this CPython and, in the slow tests, on every supported version that is installed.

Interpreters are searched on ``$PATH`` and in pyenv's folder; each gets the packages in its own environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sparkdl.data import ParquetDataset
from tests.unit.data.petastorm.unischema_folders import write_scenes

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]

CHECK = Path(__file__).with_name("containment_check.py")
OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER_VERSIONS = [version for version in ("3.10", "3.11", "3.12", "3.13") if version != OWN_VERSION]
# The requirements of Petastorm that reading needs; all of them would add an unused pyspark and its version pins.
PACKAGES = [
    "pyarrow",
    "pandas<3",
    "fsspec",
    "packaging",
    "six",
    "future",
    "dill",
    "diskcache",
    "psutil",
    "pyzmq",
]
PETASTORM = "petastorm==0.12.1"


def candidates(version: str) -> Iterator[str]:
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from (str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")))


def environment_of(version: str, folder: Path) -> Path:
    """An interpreter of this version with the packages; the test is skipped if this machine has none."""
    for path in candidates(version):
        # pyenv's shims fail for versions that are not selected.
        made = subprocess.run([path, "-m", "venv", str(folder)], capture_output=True, check=False)
        if made.returncode == 0:
            break
    else:
        pytest.skip(f"this machine has no CPython {version} that can make environments")
    python = folder / "bin" / "python"
    for arguments in (PACKAGES, ["--no-deps", PETASTORM]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True, timeout=600)
    return python


def check(python: str | Path, version: str, write_dataset: WriteDataset, folder: Path) -> None:
    plain, unischema = write_dataset([[10, 3], [20]]).url, write_scenes(folder / "scenes", [[5, 3], [4]])
    done = subprocess.run(
        [python, str(CHECK), plain, unischema], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    # The feed omits rows 0 and 1 of the 33 and of the 12 rows; Petastorm's reader reads the 33 rows again.
    assert done.stdout.split() == [version, str(31 + 10 + 33)]


def test_only_petastorm_sees_the_facades(write_dataset: WriteDataset, tmp_path: Path) -> None:
    check(sys.executable, OWN_VERSION, write_dataset, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_only_petastorm_sees_the_facades_on_other_pythons(
    version: str, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    check(environment_of(version, tmp_path / "environment"), version, write_dataset, tmp_path)
