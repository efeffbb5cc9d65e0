"""The containment on every supported CPython that is at hand and has the packages.

Interpreters are looked for in ``$SPARKDL_TEST_PYTHONS`` (paths, separated as in ``$PATH``), on ``$PATH``, and where
pyenv keeps them. One is made by ``python3.12 -m venv FOLDER`` and, with its pip, ``pip install pyarrow pandas fsspec
packaging six future dill diskcache psutil pyzmq`` and ``pip install --no-deps petastorm==0.12.1``.
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
from tests.unit.data.unischema_folders import write_scenes

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]

CHECK = Path(__file__).with_name("containment_check.py")
PROBE = """
import importlib.util, sys
names = ("petastorm", "pyarrow", "numpy", "pandas", "fsspec", "packaging")
print("%d.%d" % sys.version_info[:2], *(name for name in names if importlib.util.find_spec(name) is None))
"""


def candidates(version: str) -> Iterator[str]:
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield sys.executable
    yield from filter(None, os.environ.get("SPARKDL_TEST_PYTHONS", "").split(os.pathsep))
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from (str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")))


def interpreter(version: str) -> str:
    """An interpreter of this version that has the packages; skips the test with what was found otherwise."""
    found = []
    for path in candidates(version):
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, check=False, timeout=60)
        if done.returncode != 0:
            continue  # as pyenv's shims of a version that is not chosen
        has, *missing = done.stdout.split()
        if has == version and not missing:
            return path
        if has == version:
            found.append(f"{path} lacks {', '.join(missing)}")
    pytest.skip(f"CPython {version}: " + ("; ".join(found) or "not found"))


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_nobody_but_petastorm_sees_a_difference_on_python(
    version: str, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    python = interpreter(version)
    plain, unischema = write_dataset([[10, 3], [20]]).url, write_scenes(tmp_path / "scenes", [[5, 3], [4]])
    done = subprocess.run(
        [python, str(CHECK), plain, unischema], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # Of 33 and 12 rows the feed leaves out 0 and 1; Petastorm's reader reads the 33 once more.
    assert done.stdout.split() == [version, str(31 + 10 + 33)]
