"""The Spark session of a job. Runs on the *driver*."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.cli.quiet import quiet_libraries, quiet_spark_options
from sparkdl.errors import ClusterLostError
from sparkdl.launch.preflight import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from sparkdl.jobs.job import SparkChoice

_SECRET = re.compile(r"secret|password|token|access.?key|credential", re.IGNORECASE)
"""In names of settings; as ``spark.redaction.regex``, which says what Spark does not show, and longer."""


@contextmanager
def own_session(choice: SparkChoice, *, name: str, num_ranks: int) -> Iterator[SparkSession]:
    """Give the session that ``sparkdl train`` starts: by the job's ``spark``, else on this machine; it stops it."""
    import pyspark
    from pyspark.sql import SparkSession

    quiet_libraries()
    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    master = choice.master or f"local[{num_ranks}]"
    with tempfile.TemporaryDirectory(prefix="sparkdl-job-") as folder:
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",  # would overwrite the line of a fit
            **quiet_spark_options(Path(folder)),
        }
        if master.startswith("local"):
            settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        settings |= {"spark.master": master, "spark.app.name": name, **choice.config}
        _start_java({key: value for key, value in settings.items() if not _SECRET.search(key)})
        builder = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = _open(builder, master)
        try:
            yield session
        finally:
            session.stop()


def _start_java(settings: Mapping[str, str]) -> None:
    """Start the JVM with settings, which pyspark puts into its arguments, where everybody on the machine reads them.

    The others follow over pyspark's own connection to it.
    """
    from pyspark import SparkConf, SparkContext

    context: Any = SparkContext
    context._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(settings.items())))


@contextmanager
def given_session(*, name: str) -> Iterator[SparkSession]:
    """Give the session that spark-submit, or the platform, has its own settings for; stop it where it was not there."""
    from pyspark.sql import SparkSession

    there = SparkSession.getActiveSession()
    if there is not None:
        yield there
        return
    session = _open(SparkSession.builder.appName(name), "that spark-submit was given")
    try:
        yield session
    finally:
        session.stop()


def _open(builder: Any, master: str) -> SparkSession:
    try:
        session: SparkSession = builder.getOrCreate()
    except Exception as error:
        # Spark stops a context by itself that no master takes, while its constructor still runs.
        if "stopped SparkContext" not in str(error):
            raise
        raise ClusterLostError(
            f"The master {master} did not take the application: it does not answer, or asks for a secret "
            "(spark.authenticate) that is another here. What Spark logged says more."
        ) from error
    return session


def is_lost(session: SparkSession) -> bool:
    """Whether the application of a session has ended without being asked to, as when its cluster went away."""
    if is_connect(session):
        return False
    context: Any = session.sparkContext
    if context._jsc is None:  # it was stopped
        return False
    try:
        return bool(context._jsc.sc().isStopped())
    except Exception:  # the JVM does not answer any more
        return True
