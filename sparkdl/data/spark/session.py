"""The caller's Spark session: the active session, whether a session is of Spark Connect, and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def active_session() -> SparkSession:
    """Return the active Spark session of this thread.

    Raises:
        LaunchError: if there is none.
    """
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        raise LaunchError("There is no active Spark session. Create one first, or pass it as spark=.")
    return session


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is one of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def setting(spark: SparkSession, name: str) -> str:
    """Return a setting of the application; empty if it is not set, or the server does not return it."""
    if not is_connect(spark):
        return str(spark.sparkContext.getConf().get(name, ""))
    from pyspark.errors import PySparkException

    try:
        return spark.conf.get(name, "") or ""
    except PySparkException:  # managed servers do not return some settings
        return ""
