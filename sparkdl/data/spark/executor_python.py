"""Detects Spark jobs that failed because of the executors' Python.

That Python is missing, has another version than the driver, or lacks sparkdl or another module.
"""

from __future__ import annotations

import re
import shutil
import sys
from typing import TYPE_CHECKING, Any

from sparkdl.data.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TRACEBACK = re.compile(r"Traceback \(most recent call last\):$", re.MULTILINE)
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_NEEDED = frozenset(
    {"sparkdl", "pyspark", "cloudpickle", "fsspec", "numpy", "safetensors", "pyarrow", "pandas"}
)
_NEEDED |= {"petastorm", "torch", "py4j", "grpc"}
_PROBLEMS = (
    # Messages of pyspark; the last one is Java's, for a program that does not exist.
    re.compile(r"Python in worker has different version[^\n]*?(?= than that in driver| but)"),
    re.compile(r"(?:PyArrow|Pandas) >= [\d.]+ must be installed; however,[^\n.]*"),
    re.compile(r'Cannot run program "[^"\n]*"'),
)


def executor_python_problem(error: BaseException, spark: SparkSession) -> str:
    """Return what is wrong with the executors' Python, and what to do; empty if a job failed for another reason.

    Args:
        error: exception that a Spark job raised.
        spark: session of the job.
    """
    text = str(error)
    missing = _MISSING_MODULE.search(_last_exception(text))
    if missing is not None and missing[1].split(".")[0] not in _NEEDED:
        ship = (
            "spark.addArtifacts(path, pyfile=True)"
            if is_connect(spark)
            else "spark.sparkContext.addPyFile(path)"
        )
        return (
            f"Code that runs on the executors imports {missing[1]!r}, which is missing there. If it is your own "
            f"module, ship it with {ship}; if it belongs to a package, install the package for the executors' Python."
        )
    what = _what(text, missing)
    if not what:
        return ""
    if is_connect(spark):
        return (
            f"The Python that Spark runs on the executors {what}. Set PYSPARK_PYTHON, where the Connect server is "
            "started, to a Python that has sparkdl on every machine; or install what is missing there."
        )
    return (
        f"Spark runs {_python_of(spark)} on the executors, which {what}. Set PYSPARK_PYTHON, before the session is "
        f"made, to a Python that has sparkdl on every machine (this program runs on {sys.executable}), or "
        "spark.pyspark.python for spark-submit; or install what is missing there."
    )


def _last_exception(text: str) -> str:
    """Return the line with the exception at the end of the last Python traceback; without one, the text itself."""
    found = list(_TRACEBACK.finditer(text))
    if not found:
        return text
    line = text[text.rfind("\n", 0, found[-1].start()) + 1 : found[-1].start()]
    indent = 0 if line.strip() else len(line)
    for following in text[found[-1].end() :].splitlines():
        if following.strip() and len(following) - len(following.lstrip()) <= indent:
            return following
    return ""


def _what(text: str, missing: re.Match[str] | None) -> str:
    if missing is not None:
        return f"has no module {missing[1]!r}"
    found = next((match for match in (problem.search(text) for problem in _PROBLEMS) if match), None)
    return f"cannot be used ({' '.join(found[0].split())})" if found else ""


def _python_of(spark: SparkSession) -> str:
    context: Any = spark.sparkContext
    program = str(context.pythonExec)
    path = shutil.which(program) if context.master.startswith("local[") or context.master == "local" else None
    return repr(program) if path in {None, program} else f"{program!r} ({path})"
