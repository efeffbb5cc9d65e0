"""Options and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent
SPARK_MODES = ("local", "cluster", "connect")

BRIEF_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of JVMs that run few tests: their best compiler would take more time than it saves."""

# On a busy machine an example may exceed a deadline.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--spark",
        choices=SPARK_MODES,
        default="local",
        help="what the tests in tests/spark run on: local[2], local-cluster[2,1,1024] or Spark Connect",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Heed Ctrl-C, also in processes that the tests start: a shell makes background processes ignore it."""
    config.addinivalue_line(
        "markers",
        "slow_on(*kinds): the same claim runs daily on another kind of Spark, so it is slow on these",
    )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what was imported: its visits took a tenth of all processor time."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(tryfirst=True)  # runs before pytest evaluates -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that would only repeat on this kind of Spark what another kind proves."""
    mode = config.getoption("--spark")
    for item in items:
        if mode != "local" and item.get_closest_marker("slow_elsewhere"):
            item.add_marker(pytest.mark.slow)
        if any(mode in marker.args for marker in item.iter_markers("slow_on")):
            item.add_marker(pytest.mark.slow)
    elsewhere = {
        "any_spark_will_do": mode != "local",
        "no_cluster_needed": mode == "cluster",
        "about_connect": mode != "connect",
        "about_executors": mode != "cluster",
    }
    unwanted = [marker for marker, is_elsewhere in elsewhere.items() if is_elsewhere]
    deselected = [item for item in items if any(item.get_closest_marker(marker) for marker in unwanted)]
    items[:] = [item for item in items if item not in deselected]
    config.hook.pytest_deselected(items=deselected)


@pytest.fixture(scope="session", autouse=True)
def default_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests that use the default Store out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKDL_STORE", str(tmp_path_factory.mktemp("default store")))
        yield


@pytest.fixture(scope="session")
def spark_mode(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--spark"))


@pytest.fixture(scope="session")
def spark(spark_mode: str) -> Iterator[SparkSession]:
    """The only session of this test process; a process cannot have both a classic and a Connect session."""
    import pyspark
    from pyspark.sql import SparkSession

    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Ranks import the functions of the tests by name.
    os.environ["PYTHONPATH"] = str(ROOT)
    builder = SparkSession.builder.appName("sparkdl tests")
    if spark_mode == "connect":
        os.environ["SPARK_TESTING"] = "1"  # makes the server listen on a free port instead of 15002
        builder = builder.remote("local[2]")
    else:
        builder = builder.master("local[2]" if spark_mode == "local" else "local-cluster[2,1,1024]")
    if spark_mode != "local":
        for side in ("driver", "executor"):
            builder = builder.config(f"spark.{side}.extraJavaOptions", BRIEF_JVM)
    session = (
        builder.config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    app = session.sparkContext.applicationId if spark_mode == "cluster" else ""
    yield session
    session.stop()
    if app:
        # The folders of the executors, which hold large models among others; local-cluster leaves them behind.
        shutil.rmtree(Path(os.environ["SPARK_HOME"], "work", app), ignore_errors=True)
