"""A Spark session on this machine for programs of our own: the demo and the benchmarks. Runs on the *driver*."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.cli.quiet import quiet_libraries, quiet_spark_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start_local_session(name: str, num_slots: int, folder: Path, **options: str) -> SparkSession:
    """Start a session without an interface, that logs errors alone; whoever asked for it stops it.

    Args:
        name: of the application.
        num_slots: tasks that run at once.
        folder: where it writes what it has to.
        options: of Spark, with ``_`` for the dots in their names after ``spark.``: ``driver_memory="4g"``.
    """
    import pyspark
    from pyspark.sql import SparkSession

    quiet_libraries()
    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.master(f"local[{num_slots}]")
        .appName(name)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")  # would overwrite the line of a fit
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(folder / "spark-warehouse"))
    )
    for option, value in options.items():
        builder = builder.config(f"spark.{option.replace('_', '.')}", value)
    for key, value in quiet_spark_options(folder).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session
