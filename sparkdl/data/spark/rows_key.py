"""Keys of the rows of a DataFrame. Runs on the *driver*, on classic Spark and on Spark Connect alike.

Rows are shared only by fits on the same DataFrame object, while the settings of its session and the files below it stay
the same: :func:`shared_key`. Neither a plan's text nor its hash identifies rows. :func:`lasting_key` is also valid in
other applications, but only for rows that a user named and that come from files alone; with it a job determines whether
it has already been done.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sparkdl.data.spark.input_files import input_files
from sparkdl.data.spark.plans import UnknownRowsError, leaves_of
from sparkdl.identity import digest
from sparkdl.spark.jobs import spark_job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

    from sparkdl.data.spark.plans import Leaves

logger = logging.getLogger(__name__)


def shared_key(df: DataFrame, options: Mapping[str, Any]) -> str | None:
    """Return a key that changes when a DataFrame object gives other rows, as 24 hexadecimal digits.

    Args:
        df: the DataFrame that the user gave. Equal keys of two objects do not mean equal rows.
        options: other values that the written files depend on, of types that JSON takes.

    Returns:
        A key that covers all settings of the session, and the names, sizes and times of the files that are read (of a
        Delta table also its log). None if the plan can give other rows in another run, or has other leaves
        than files, ranges and rows that the driver holds.
    """
    try:
        _, files = _repeatable(df)
        return digest({"files": files, "settings": _settings(df), "options": dict(options)})
    except Exception as error:  # sharing rows only saves work; without a key they are written for this fit
        logger.info("The rows are written for this fit alone: %s.", _why(error))
        return None


def lasting_key(df: DataFrame, source: Sequence[str]) -> str | None:
    """Return a key of rows that a user named, which is also valid in other Spark applications.

    Args:
        df: DataFrame of the rows, with the columns that matter.
        source: the source that the user named: the kind and the name of a table, the files, or a query.

    Returns:
        The key of the source, the schema, the files, and the settings of ``spark.sql``; None as for
        :func:`shared_key`, and for rows that do not come from files alone, or through a view.
    """
    try:
        leaves, files = _repeatable(df)
        if not leaves.has_files_only:
            return None
        settings = {
            name: value
            for name, value in _settings(df).items()
            if name.startswith("spark.sql.") and name != "spark.sql.warehouse.dir"
        }
        schema = df.schema.jsonValue()
        return digest({"source": list(source), "schema": schema, "files": files, "settings": settings})
    except Exception as error:  # doing work again is better than not doing it
        logger.info("It is not known whether the rows have changed: %s.", _why(error))
        return None


def _repeatable(df: DataFrame) -> tuple[Leaves, str]:
    """Return the leaves of a plan and the state of its files."""
    # Planned again, because Spark remembers in a DataFrame object whether it was cached when it was first run.
    leaves = leaves_of(df.select("*"))
    if not leaves.num_reads:
        return leaves, ""
    files = input_files(df)
    if files is None or files.identity is None:
        raise UnknownRowsError("its files cannot be seen from the driver, or it is cached")
    return leaves, files.identity


def _settings(df: DataFrame) -> dict[str, str]:
    """Return all settings of a session; Spark leaves out the values of secret ones."""
    with spark_job(df.sparkSession, "reading settings"):
        return {row[0]: row[1] for row in df.sparkSession.sql("SET").collect()}


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, UnknownRowsError) else f"{type(error).__name__}: {error}"
