"""Starts a Spark session for the programs of this package, and reduces the logging of libraries.

Only programs may use these functions: a library does not change the logging of its users.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def spark_options(master: str, folder: Path) -> dict[str, str]:
    """Return the options of a session without web UI that logs only errors.

    Setting the log level of a running session would be too late: most lines are logged while Spark starts.

    Args:
        master: URL of the session's master.
        folder: folder to which the log settings are written.
    """
    file = folder / "log4j2.properties"
    file.write_text(_LOG4J)
    options = {
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={file.as_uri()}"',
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",  # would overwrite the progress line of a fit
    }
    if master.startswith("local"):
        options |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    return options


def use_own_spark() -> None:
    """Make Spark use the installation and the Python of this process, unless the environment names others."""
    import pyspark

    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def quiet_libraries() -> None:
    """Set the log level of MLflow, and of the migrations that make its database, to warnings."""
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # read when mlflow is imported
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def start_session(name: str, master: str, folder: Path, **options: str) -> SparkSession:
    """Start a session, as :func:`spark_options` describes it; as a context manager, it stops at the end.

    Args:
        name: name of the application.
        master: URL of the session's master.
        folder: folder for the log settings and the warehouse of the session.
        options: further options of Spark, without ``spark.`` and with ``_`` for dots: ``driver_memory="4g"``.
    """
    from pyspark.sql import SparkSession

    quiet_libraries()
    use_own_spark()
    settings = {
        **spark_options(master, folder),
        "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
        **{f"spark.{option.replace('_', '.')}": value for option, value in options.items()},
    }
    builder = SparkSession.builder.master(master).appName(name)
    session: SparkSession = builder.config(map={**settings}).getOrCreate()
    return session
