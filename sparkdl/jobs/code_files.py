"""The Python code of a job: found on the driver, shipped to the ranks. Runs on the *driver*.

What the job names under ``code`` is shipped, and modules beside the job's file that it imports by name.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import JobFileError
from sparkdl.jobs.imports import import_paths
from sparkdl.launch.preflight import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from sparkdl.jobs.job import Job

_ARCHIVES = (".zip", ".whl", ".egg")


def code_files(job: Job) -> list[Path]:
    """Return files and folders of code, those that the job names and those that it imports from beside its file.

    Raises:
        JobFileError: if one that it names is not there, or is no Python code.
    """
    found = list(job.code)
    for path in job.code:
        if not path.exists():
            raise JobFileError(
                f"{job.file}: code: {path} does not exist; it is sought beside the job's file."
            )
        if path.is_file() and path.suffix not in (".py", *_ARCHIVES):
            raise JobFileError(f"{job.file}: code: {path} is none of *.py, *.zip, *.whl and folders.")
    folder = job.file.parent
    for entry in (job.model, *job.params.values()):
        for name in import_paths(entry):
            top = name.split(":")[0].split(".")[0]
            found += [
                path for path in (folder / f"{top}.py", folder / top) if path.is_file() or _is_package(path)
            ]
    return list(dict.fromkeys(path.resolve() for path in found))


@contextmanager
def importable(files: list[Path]) -> Iterator[None]:
    """Have this process import from files and folders before anything else."""
    entries = [str(path if path.suffix in _ARCHIVES else path.parent) for path in files]
    added = [entry for entry in dict.fromkeys(entries) if entry not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for entry in added:
            if entry in sys.path:
                sys.path.remove(entry)


def ship(files: list[Path], spark: SparkSession) -> None:
    """Have the tasks of a session, and with them the ranks, import from files and folders."""
    for path in files:
        if path.is_dir():
            with tempfile.TemporaryDirectory(prefix="sparkdl-code-") as folder:
                archive = shutil.make_archive(f"{folder}/{path.name}", "zip", path.parent, path.name)
                _add(archive, spark)
        else:
            _add(str(path), spark)


def loggable(files: list[Path]) -> list[Path]:
    """Return files and folders that MLflow takes along with a model; archives are none, as it does not import them."""
    return [path for path in files if path.suffix not in _ARCHIVES]


def digests(files: list[Path]) -> dict[str, str]:
    """Return by name what files and folders hold, so that another version of them is noticed."""
    return {path.name: _digest(path) for path in files}


def _is_package(path: Path) -> bool:
    return (path / "__init__.py").is_file()


def _add(path: str, spark: SparkSession) -> None:
    if is_connect(spark):
        session: Any = spark
        session.addArtifacts(path, pyfile=True)
    else:
        spark.sparkContext.addPyFile(path)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for file in files:
        if "__pycache__" in file.parts:
            continue
        digest.update(f"{file.relative_to(path)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
