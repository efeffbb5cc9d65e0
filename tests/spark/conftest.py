from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
import pytest

from sparkdl.launch import run_on_ranks
from tests.servers.fresh_mlflow import tracked
from tests.spark.estimators.estimator_examples import make_frame
from tests.spark.launch.rank_functions import Launch

__all__ = ["tracked"]


@pytest.fixture(scope="session")
def frame(spark):
    return make_frame(spark).cache()


@pytest.fixture
def launch(spark) -> Launch:
    """Runs a function on two ranks."""
    return partial(run_on_ranks, num_ranks=2, spark=spark)


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[Any], Any]]:
    """A function for mapInArrow that makes the file ``running`` and waits for ``release`` or the end of the test."""
    running, release = tmp_path / "running", tmp_path / "release"

    def hold_slot(batches: Any) -> Any:
        running.touch()
        while not release.exists():
            threading.Event().wait(0.05)
        yield from batches

    yield hold_slot
    release.touch()


@pytest.fixture
def bare_python(spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a Python without sparkdl that of the executors."""
    libraries = ":".join(map(str, (Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip")))
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nPYTHONPATH="{libraries}" exec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
