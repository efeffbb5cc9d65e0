"""Keeps harmless notices of Spark and MLflow from a user who sees them for the first time. Runs on the *driver*.

Only for programs of our own that start their own session; a library leaves the logging of its users alone.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

_LOG4J = """\
status = error
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
# Spark takes the level of this logger for the root's, and says so where they differ.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""


def quiet_spark_options(folder: Path) -> dict[str, str]:
    """Write a log4j file to ``folder``, and return the Spark options by which only errors are logged.

    The level of a running session comes too late: the loudest lines are written while Spark starts.
    """
    file = folder / "log4j2.properties"
    file.write_text(_LOG4J)
    return {"spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={file.as_uri()}"'}


def quiet_libraries() -> None:
    """Let MLflow, and the migrations by which it makes its database, log warnings only."""
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # read when mlflow is imported
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
