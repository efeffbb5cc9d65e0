"""What the exceptions of Spark jobs mean: one error of sparkdl each, without Java's stack traces.

Spark's error condition, the class of the last cause, and the state of the session decide, by the table of
:mod:`sparkdl.foreign_errors`. Messages decide only where Spark has neither class nor condition: lost executors,
executors without a usable Python, cancellations before Spark 4, and on Spark Connect the end of the server's
application.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sparkdl import errors
from sparkdl.errors import (
    ClusterLostError,
    CorruptFileError,
    DataError,
    ExecutorsLostError,
    LaunchCancelledError,
    LaunchError,
    SparkdlError,
    SparkJobError,
    StoreError,
)
from sparkdl.foreign_errors import first_meaning, one_line
from sparkdl.spark.session import is_connect, is_context_stopped, setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

_FILE = re.compile(r"Encountered error while reading file (\S+?)\.?(?:\s|$)")
_GONE = re.compile(r"SparkFileNotFoundException: File (.+?) does not exist")  # as Spark 3.5 says it
_CAUSE = re.compile(r"^Caused by: (.+)$", re.MULTILINE)
_CONDITION = re.compile(r"\[([A-Z_]+(?:\.[A-Z_]+)?)\]")
_JAVA_CLASS = re.compile(r"\b(?:[a-z]\w*\.)+([A-Z][\w$]*)(?=[:\s]|$)")
_JAVA_EXCEPTION = re.compile(r"\b(?:[a-z]\w*\.)+[A-Z][\w$]*: ")
_SYSTEM_ERROR = re.compile(r"FileNotFoundException: .* \(([^()]+)\)$")
_OTHER_ERRORS = frozenset(
    map(os.strerror, (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE))
)
"""Errors of the system for which Java has this class as well, although the file is there."""

_SERVER_CODE = re.compile(r"\bError Code: (\w+)")  # as Amazon's library for Java writes it
_OWN_ERROR = re.compile(r"^sparkdl\.errors\.(\w+): (.+?)\s*$", re.MULTILINE)

# gRPC also reports CANCELLED for a connection that was closed on the way.
_CANCELLED = re.compile(r"(?<!StatusCode\.)cancell?ed(?! because SparkContext was shut down)", re.IGNORECASE)
_ENDED = re.compile(
    r"SparkContext was shut ?down|SparkContext has been shut ?down|stopped SparkContext|LiveListenerBus is stopped"
)
_LOST = re.compile(
    r"Python worker exited unexpectedly|ExecutorLostFailure|ExecutorExited|[Ee]xecutor \S+ (?:was )?(?:lost|exited)"
    r"|[Ee]xecutor heartbeat timed out|Remote RPC client disassociated"
)

_NO_CONNECTOR = re.compile(
    r"No FileSystem for scheme \W?(\w+)|Class (?:org\.apache|com\.google\.cloud)\.hadoop\.fs\.(\w+)\S+ not found"
)
_AWS, _AZURE = "org.apache.hadoop:hadoop-aws", "org.apache.hadoop:hadoop-azure"
_CONNECTORS = {
    **dict.fromkeys(("s3", "s3a", "s3n"), f"{_AWS} (URLs then begin with s3a:)"),
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs", "azure", "azurebfs"), _AZURE),
    **dict.fromkeys(("gs", "gcs"), "com.google.cloud.bigdataoss:gcs-connector"),
}
"""Packages with Hadoop's connectors, by the scheme of URLs or the package of the connector's class."""

_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_NEEDED = frozenset(
    {
        "cloudpickle",
        "fsspec",
        "grpc",
        "numpy",
        "pandas",
        "petastorm",
        "py4j",
        "pyarrow",
        "pyspark",
        "safetensors",
        "sparkdl",
        "torch",
    }
)
"""Modules that belong to the Python of the executors; others are the user's own."""

_UNUSABLE_PYTHON = re.compile(
    # Messages of pyspark; the last one is Java's, for a program that does not exist.
    r"Python in worker has different version[^\n]*?(?= than that in driver| but)"
    r"|(?:PyArrow|Pandas) >= [\d.]+ must be installed; however,[^\n.]*"
    r'|Cannot run program "[^"\n]*"'
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):$", re.MULTILINE)

# Exceptions whose class says nothing; all others of pyspark are conditions of the query that users know.
_UNNAMED = frozenset(
    {"SparkConnectException", "SparkConnectGrpcException", "SparkException", "UnknownException"}
)
_MAX_WORDS = 400


@contextmanager
def spark_failures_named(
    spark: SparkSession,
    *,
    doing: str = "sparkdl",
    explain_file: Callable[[str], DataError | None] | None = None,
) -> Iterator[None]:
    """Convert failures of the Spark jobs that a block runs to errors that say what was wrong.

    Args:
        spark: the session.
        doing: purpose of the jobs, for the message.
        explain_file: function that takes the URL of a file that Spark could not read, and returns an error with more
            than Spark says, or None; called only after such a failure.

    Raises:
        LaunchError: if the executors' Python lacks what is needed.
        DataError: if a file cannot be read, with a class that says why; or, like StoreError, if a function of sparkdl
            raised it on an executor.
        StoreError: if Spark lacks Hadoop's connector for a URL.
        ExecutorsLostError: if Python workers or executors were lost, more often than Spark tries a task.
        LaunchCancelledError: if the job was cancelled.
        ClusterLostError: if Spark's application ended.
        SparkJobError: if the job failed for another reason that py4j or gRPC reports.
        Exception: a condition of the query with a class of pyspark, as Spark raised it.
    """
    try:
        yield
    except SparkdlError:
        raise
    except Exception as error:
        explained: SparkdlError | None = _explain_reading(error, doing, explain_file)
        if explained is None and (_is_unnamed(error) or _is_of_code(error)):
            explained = explain_job(error, spark, doing)
        if explained is None and _is_unnamed(error):
            explained = SparkJobError(
                f"{doing}: the Spark job failed: {spark_words(error)}. Spark's exception is the cause of this one."
            )
        if explained is None:
            raise
        raise explained from error


def explain_job(error: Exception, spark: SparkSession, doing: str) -> SparkdlError | None:
    """Return the error for a Spark job that did not fail by what it computes; None for all other failures.

    Args:
        error: exception of Spark that ended the job.
        spark: session of the job.
        doing: purpose of the job, for the message.

    Returns:
        A ``LaunchError`` if the executors' Python lacks what is needed, a ``ClusterLostError`` if Spark's application
        ended, an ``ExecutorsLostError`` if Python workers or executors were lost, more often than Spark tries a task,
        and a ``LaunchCancelledError`` if the job was cancelled: in Spark's UI, by its tag or group, or on Connect as an
        operation.
    """
    problem = executor_python_problem(error, spark)
    if problem:
        return LaunchError(problem)
    if _is_of_code(error):
        return None
    if _has_application_ended(error, spark):
        return cluster_lost_error(error, doing)
    # Checked before a cancellation, because Spark also cancels the other tasks of a job that fails.
    if _LOST.search(str(error)):
        once = ""
        if re.fullmatch(r"local(\[[^,]*\])?", setting(spark, "spark.master")):
            once = (
                " With the master local[N] Spark tries no task again; with local[N, 4] it tries a task up to four "
                "times, except for those of ranks."
            )
        return ExecutorsLostError(
            f"{doing}: a Python worker or executor was lost: {spark_words(error)}. Often the machine had no memory "
            "left for it: look at the executors' logs, give them more (spark.executor.memoryOverhead) or their tasks "
            f"less (smaller partitions, smaller batches), and run it again.{once}"
        )
    if _was_cancelled(error):
        return LaunchCancelledError(f"{doing}: the job was cancelled in Spark: {spark_words(error)}")
    return None


def cluster_lost_error(error: Exception, doing: str) -> ClusterLostError:
    """Return the error for a job that failed because Spark's application ended."""
    return ClusterLostError(
        f"{doing}: Spark's application ended while a job ran: its cluster went away, or it was stopped. "
        f"{spark_words(error)}"
    )


def mentions_stopped_context(error: Exception) -> bool:
    """Whether a message says that the context was stopped, for errors without a session whose state shows it."""
    return _ENDED.search(str(error)) is not None


def spark_words(error: Exception) -> str:
    """Return Spark's message in one line, without Java's classes and stacks, and without py4j's first line."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    line = next((line for line in lines if line and not line.startswith("An error occurred")), "")
    if not line:
        return type(error).__name__
    words = _JAVA_EXCEPTION.sub("", line.partition(" Consider setting ")[0]).rstrip(". ")
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}..."


def executor_python_problem(error: BaseException, spark: SparkSession) -> str:
    """Return what is wrong with the executors' Python, and what to do; empty if a job failed for another reason.

    That Python is missing, has another version than the driver, or lacks sparkdl or another module.

    Args:
        error: exception that a Spark job raised.
        spark: session of the job.
    """
    text = str(error)
    missing = _MISSING_MODULE.search(_last_exception(text))
    unusable = _UNUSABLE_PYTHON.search(text)
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
    if missing is not None:
        problem = f"has no module {missing[1]!r}"
    elif unusable is not None:
        problem = f"cannot be used ({' '.join(unusable[0].split())})"
    else:
        return ""
    if is_connect(spark):
        return (
            f"The Python that Spark runs on the executors {problem}. Set PYSPARK_PYTHON, where the Connect server is "
            "started, to a Python that has sparkdl on every machine; or install what is missing there."
        )
    return (
        f"Spark runs {_python_of(spark)} on the executors, which {problem}. Set PYSPARK_PYTHON, before the session is "
        f"made, to a Python that has sparkdl on every machine (this program runs on {sys.executable}), or "
        "spark.pyspark.python for spark-submit; or install what is missing there."
    )


def _explain_reading(
    error: Exception, doing: str, explain_file: Callable[[str], DataError | None] | None
) -> SparkdlError | None:
    """Return the error for data that an executor could not read or write; None for other failures."""
    raised_on_executor = _error_of_executor(error)
    if raised_on_executor is not None:
        return raised_on_executor
    text = str(error)
    file = _FILE.search(text) or _GONE.search(text)
    if file is not None:
        url = unquote(file[1])
        explained = explain_file(url) if explain_file is not None else None
        return explained or _file_error(url, text)
    connector = _NO_CONNECTOR.search(text)
    if connector is None:
        return None
    package = _CONNECTORS.get(connector[1] or connector[2], "the package that has it")
    return StoreError(
        f"{doing}: Spark lacks Hadoop's connector for this filesystem: {spark_words(error)}. Start Spark with "
        f"{package} in spark.jars.packages, in a version that fits Spark's Hadoop libraries."
    )


def _error_of_executor(error: Exception) -> SparkdlError | None:
    """Return the error of sparkdl's function on an executor, which Spark reports as text; None for other failures."""
    if not _is_of_code(error):
        return None
    *_, last = _OWN_ERROR.findall(str(error)) or [("", "")]
    kind = getattr(errors, last[0], None)
    if isinstance(kind, type) and issubclass(kind, (DataError, StoreError)):
        return kind(last[1])
    return None


def _file_error(url: str, text: str) -> DataError:
    """Return the error for a file that Spark could not read, from the condition and the classes that Spark names."""
    causes = _CAUSE.findall(text)
    cause = causes[-1].strip() if causes else text.strip().splitlines()[0]
    # The last class is that of the innermost exception, whose name says most after the server's code.
    names = *_SERVER_CODE.findall(cause), *reversed(_JAVA_CLASS.findall(cause)), *_CONDITION.findall(text)
    meaning = first_meaning(names)
    system_error = _SYSTEM_ERROR.search(cause)
    if system_error is not None and system_error[1] in _OTHER_ERRORS:
        meaning = None
    words = one_line(_JAVA_EXCEPTION.sub("", cause))
    if meaning is None or not issubclass(meaning.error, DataError):
        return DataError(
            f"Spark cannot read {url}: {words} See whether every executor can read it; if so, the file may be damaged."
        )
    where = f"Spark cannot read {url}: "
    if issubclass(meaning.error, CorruptFileError):
        return meaning.error(f"{where}{words} {meaning.text.capitalize()}. {meaning.remedy}")
    return meaning.error(f"{where}{meaning.text}: {words} {meaning.remedy}")


def _is_unnamed(error: Exception) -> bool:
    """Whether the class of an exception says nothing but that a Spark job failed."""
    library = type(error).__module__.split(".")[0]
    return library in ("py4j", "grpc") or (library == "pyspark" and type(error).__name__ in _UNNAMED)


def _is_of_code(error: Exception) -> bool:
    """Whether Python code on an executor raised; the text of such an exception is that of the code."""
    return type(error).__name__ == "PythonException"


def _was_cancelled(error: Exception) -> bool:
    condition = _condition(error)
    if condition is None:
        return _CANCELLED.search(str(error)) is not None
    meaning = first_meaning([condition])
    return meaning is not None and meaning.error is LaunchCancelledError


def _has_application_ended(error: Exception, spark: SparkSession) -> bool:
    is_of_connect = "connect" in f"{type(spark).__module__} {type(error).__module__}"
    return mentions_stopped_context(error) if is_of_connect else is_context_stopped(spark)


def _condition(error: Exception) -> str | None:
    """Return the error condition of an exception of Spark, such as ``TABLE_OR_VIEW_NOT_FOUND``; None without one."""
    from pyspark.errors import PySparkException

    source: Any = error
    if not isinstance(error, PySparkException):
        # Of py4j, which a pure client of Spark Connect does not have.
        source = getattr(error, "java_exception", None)
        if source is None:
            return None
    # Before Spark 4 a condition was called an error class.
    for name in ("getCondition", "getErrorClass"):
        try:
            return getattr(source, name)()  # type: ignore[no-any-return]  # of Py4J
        except Exception:  # noqa: S112 - a Java exception without conditions, an older Spark, or a JVM that has ended
            continue
    return None


def _last_exception(text: str) -> str:
    """Return the line with the exception at the end of the last Python traceback; without one, the text itself."""
    tracebacks = list(_TRACEBACK.finditer(text))
    if not tracebacks:
        return text
    last = tracebacks[-1]
    line = text[text.rfind("\n", 0, last.start()) + 1 : last.start()]
    indent = 0 if line.strip() else len(line)
    for following in text[last.end() :].splitlines():
        if following.strip() and len(following) - len(following.lstrip()) <= indent:
            return following
    return ""


def _python_of(spark: SparkSession) -> str:
    context: Any = spark.sparkContext
    program = str(context.pythonExec)
    path = shutil.which(program) if context.master.startswith("local[") or context.master == "local" else None
    return repr(program) if path in {None, program} else f"{program!r} ({path})"
