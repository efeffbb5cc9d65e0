"""Finds the Python objects and the Python code of a job on the *driver*, and ships the code to the ranks.

An import path ``MODULE:NAME`` stands for an object. With arguments, a class stands for an instance, and a function for
that function with the arguments bound.

The shipped code is the files and folders under ``code``, and the modules beside the job file that import paths name.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import JobFileError
from sparkdl.identity import checksum
from sparkdl.jobs.job import Section
from sparkdl.jobs.yaml_tree import ARGUMENTS, IMPORT, JobEntry, suggestion
from sparkdl.spark.session import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from sparkdl.jobs.job import PredictionJob, TrainingJob


def call_named(entry: JobEntry, path: str, around: AbstractContextManager[None]) -> Any:
    """Call an imported function or class with its arguments and return the result; return other objects as they are.

    Args:
        entry: import path, or mapping with ``import`` and ``arguments``.
        path: key of the entry, used in error messages.
        around: context manager that is entered for the call, after the import.

    Raises:
        JobFileError: if the import or the call fails.
    """
    value, arguments = _resolve(entry, path)
    if callable(value) and not _is_module(value):
        with around:
            return _call(value, arguments)
    return _without_arguments(value, arguments)


def named_object(
    entry: JobEntry, path: str, *, makes_instances: bool = True, takes_names: bool = False
) -> Any:
    """Return the Python object for a value of a Param.

    Texts, and mappings with ``import``, are imports. Lists and other mappings contain such values. All other values
    stand for themselves.

    Args:
        entry: value of the Param.
        path: key of the entry, used in error messages.
        makes_instances: whether a class stands for an instance; otherwise it counts as a function.
        takes_names: whether texts without a colon are not imports but names that the Param knows, such as ``adamw``.

    Raises:
        JobFileError: if the import or the call of a class fails.
    """
    value = entry.value
    if isinstance(value, list):
        return [
            named_object(item, f"{path}[{index}]", makes_instances=makes_instances, takes_names=takes_names)
            for index, item in enumerate(value)
        ]
    if isinstance(value, dict) and IMPORT not in value:
        return {
            key: named_object(item, f"{path}.{key}", makes_instances=makes_instances, takes_names=takes_names)
            for key, item in value.items()
        }
    if not isinstance(value, dict | str) or (takes_names and isinstance(value, str) and ":" not in value):
        return value
    imported, arguments = _resolve(entry, path)
    if isinstance(imported, type) and makes_instances:
        return _call(imported, arguments)
    if not callable(imported) or _is_module(imported):
        return _without_arguments(imported, arguments)
    keywords = arguments.plain()
    return functools.partial(imported, **keywords) if keywords else imported


def import_paths(entry: JobEntry) -> list[str]:
    """Return the import paths in a value that :func:`named_object` takes."""
    value = entry.value
    if isinstance(value, list):
        return [path for entry in value for path in import_paths(entry)]
    if isinstance(value, dict):
        return (
            import_paths(value[IMPORT])
            if IMPORT in value
            else [p for e in value.values() for p in import_paths(e)]
        )
    return [value] if isinstance(value, str) and ":" in value else []


def _resolve(entry: JobEntry, path: str) -> tuple[Any, Section]:
    mapping = entry if isinstance(entry.value, dict) else JobEntry({IMPORT: entry}, entry.position)
    section = Section(mapping, path, (IMPORT, ARGUMENTS), entry.position)
    arguments = Section(section.entries.get(ARGUMENTS), f"{path}.{ARGUMENTS}", None, section.position)
    name = section.string(IMPORT) or ""
    module, colon, inner = name.partition(":")
    if not (module and colon and inner):
        raise section.error(f"takes MODULE:NAME, as torch.nn:CrossEntropyLoss, got {name!r}.", IMPORT)
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise section.error(
                f"there is no module {error.name!r}. Put its file beside the job's, name it under code, or ship it by "
                "--py-files of spark-submit.",
                IMPORT,
            ) from error
        raise section.error(f"{module} cannot be imported: {error}.", IMPORT) from error
    except Exception as error:
        raise section.error(
            f"{module} cannot be imported: {type(error).__name__}: {error}.", IMPORT
        ) from error
    for part in inner.split("."):
        if not hasattr(value, part):
            names = [name for name in dir(value) if not name.startswith("_")]
            raise section.error(f"{module} has no {inner!r}. {suggestion(part, names)}", IMPORT)
        value = getattr(value, part)
    return value, arguments


def _call(imported: Any, arguments: Section) -> Any:
    keywords = arguments.plain()
    try:
        return imported(**keywords)
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
        name = getattr(imported, "__qualname__", type(imported).__name__)
        # Finds the line of the argument: Python quotes an unknown argument in the message, and has no attribute for it.
        key = next((key for key in keywords if f"'{key}'" in str(error)), None)
        raised = f"{type(error).__name__}: {error}{_where(error)}"
        raise arguments.error(f"{name}({shown}) raised {raised}.", key) from error


def _without_arguments(imported: Any, arguments: Section) -> Any:
    if arguments.entries:
        raise arguments.error(
            f"the imported object is of the type {type(imported).__name__}, and takes none."
        )
    return imported


def _where(error: Exception) -> str:
    """Return the file and line that raised; empty if the call itself did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__") == __name__:
        return ""
    return f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"


def _is_module(found: Any) -> bool:
    """Return whether an object is a torch module, which is callable, but with rows instead of arguments of a job."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(found, torch.nn.Module)


_ARCHIVES = (".zip", ".whl", ".egg")


def code_files(job: TrainingJob | PredictionJob) -> list[Path]:
    """Return the files and folders of code: those under ``code``, and the imported ones beside the job file.

    Raises:
        JobFileError: if a path under ``code`` does not exist, or is not Python code, or two have one name.
    """
    files = list(job.code)
    for path in job.code:
        if not path.exists():
            raise JobFileError(
                f"{job.file}: code: {path} does not exist. Paths are relative to the job's file."
            )
        if path.is_file() and path.suffix not in (".py", *_ARCHIVES):
            raise JobFileError(f"{job.file}: code: {path} is not a *.py, *.zip or *.whl file or a folder.")
    folder = job.file.parent
    for entry in job.entries:
        for name in import_paths(entry):
            top = name.split(":")[0].split(".")[0]
            files += [
                path
                for path in (folder / f"{top}.py", folder / top)
                if path.is_file() or (path / "__init__.py").is_file()
            ]
    by_name: dict[str, Path] = {}
    for path in map(Path.resolve, files):
        other = by_name.setdefault(path.name, path)
        if other != path:
            raise JobFileError(
                f"{job.file}: {other} and {path} are both code of this job. On the ranks the second would replace the "
                "first, as they have one name. Rename one of them."
            )
    return list(by_name.values())


@contextmanager
def importable(files: list[Path]) -> Iterator[None]:
    """Put files and folders at the head of ``sys.path``."""
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
    """Make files and folders importable in the tasks of a session, and so on the ranks."""
    session: Any = spark
    add = (
        functools.partial(session.addArtifacts, pyfile=True)
        if is_connect(spark)
        else session.sparkContext.addPyFile
    )
    for path in files:
        if path.is_dir():
            with tempfile.TemporaryDirectory(prefix="sparkdl-code-") as folder:
                add(shutil.make_archive(f"{folder}/{path.name}", "zip", path.parent, path.name))
        else:
            add(str(path))


def loggable(files: list[Path]) -> list[Path]:
    """Return the files and folders that MLflow logs with a model: all but archives, from which it does not import."""
    return [path for path in files if path.suffix not in _ARCHIVES]


def checksums(files: list[Path]) -> dict[str, str]:
    """Return the checksum of each file and folder, by name."""
    return {path.name: checksum(b"".join(_content(path))) for path in files}


def _content(path: Path) -> Iterator[bytes]:
    """Yield names and contents of all files of a folder, or of a file."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        if "__pycache__" not in file.parts:
            yield f"{file.relative_to(path)}\0".encode()
            yield file.read_bytes()
