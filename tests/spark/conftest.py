from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.fresh_mlflow import tracked
from tests.spark.estimators.estimator_examples import make_frame

__all__ = ["tracked"]


@pytest.fixture(scope="session")
def frame(spark):
    return make_frame(spark).cache()


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
