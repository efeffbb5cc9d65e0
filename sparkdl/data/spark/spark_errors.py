"""What an exception of a Spark job means: cancelled, executors lost, or the application ended.

The error condition of the exception and the state of the session decide. The texts of messages decide only where
Spark has no condition: for cancellations before Spark 4, lost executors, and on Spark Connect the end of the server's
application.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from sparkdl.data.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CANCELLED_CONDITIONS = frozenset({"SPARK_JOB_CANCELLED", "OPERATION_CANCELED"})
# gRPC also reports CANCELLED for a connection that was closed on the way.
_CANCELLED = re.compile(r"(?<!StatusCode\.)cancell?ed(?! because SparkContext was shut down)", re.IGNORECASE)
_ENDED = re.compile(
    r"SparkContext was shut ?down|SparkContext has been shut ?down|stopped SparkContext|LiveListenerBus is stopped"
)
_LOST = re.compile(
    r"Python worker exited unexpectedly|ExecutorLostFailure|ExecutorExited|[Ee]xecutor \S+ (?:was )?(?:lost|exited)"
    r"|[Ee]xecutor heartbeat timed out|Remote RPC client disassociated"
)
_JAVA_EXCEPTION = re.compile(r"\b(?:[a-z]\w*\.)+[A-Z][\w$]*: ")
_MAX_WORDS = 400


def was_cancelled(error: Exception | None) -> bool:
    """Whether the job was cancelled: in Spark's UI, by its tag or group, or on Connect as an operation."""
    condition = error_condition(error)
    return condition in _CANCELLED_CONDITIONS or (
        condition is None and _CANCELLED.search(str(error or "")) is not None
    )


def were_executors_lost(error: Exception | None) -> bool:
    """Whether a Python worker or an executor was lost more often than Spark retries a task."""
    return _LOST.search(str(error or "")) is not None


def has_application_ended(error: Exception | None, spark: SparkSession) -> bool:
    """Whether the job failed because Spark's application has ended."""
    if error is None:
        return False
    is_of_connect = "connect" in f"{type(spark).__module__} {type(error).__module__}"
    return mentions_stopped_context(error) if is_of_connect else is_context_stopped(spark)


def mentions_stopped_context(error: Exception) -> bool:
    """Whether a message says that the context was stopped, for errors without a session whose state shows it."""
    return _ENDED.search(str(error)) is not None


def is_session_stopped(spark: SparkSession) -> bool:
    """Whether a session was stopped, by ``stop()`` or with its application."""
    return bool(cast("Any", spark).is_stopped) if is_connect(spark) else is_context_stopped(spark)


def is_context_stopped(spark: SparkSession) -> bool:
    """Whether the context of a classic session was stopped, or its JVM does not answer."""
    context: Any = spark.sparkContext
    if context._jsc is None:
        return True
    try:
        return bool(context._jsc.sc().isStopped())
    except Exception:  # of py4j, whose connection to the JVM is closed
        return True


def error_condition(error: Exception | None) -> str | None:
    """Return the error condition of an exception of Spark, such as ``TABLE_OR_VIEW_NOT_FOUND``; None without one."""
    from pyspark.errors import PySparkException

    source: Any = error
    if not isinstance(error, PySparkException):
        source = getattr(
            error, "java_exception", None
        )  # of py4j, which a pure client of Spark Connect does not have
        if source is None:
            return None
    # Before Spark 4 a condition was called an error class.
    for name in ("getCondition", "getErrorClass"):
        try:
            return getattr(source, name)()  # type: ignore[no-any-return]  # of Py4J
        except Exception:  # noqa: S112 - a Java exception without conditions, an older Spark, or a JVM that has ended
            continue
    return None


def spark_words(error: Exception | None) -> str:
    """Return Spark's message in one line, without Java's classes and stacks, and without py4j's first line."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    line = next((line for line in lines if line and not line.startswith("An error occurred")), "")
    if not line:
        return type(error).__name__
    words = _JAVA_EXCEPTION.sub("", line.partition(" Consider setting ")[0]).rstrip(". ")
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}..."
