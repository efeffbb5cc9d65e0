"""Unconfigured MLflow, for the tests of runs and of fits that make runs."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import mlflow.store.db.utils as databases
import pytest

from sparkdl.tracking import FitRun, is_tracking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy.engine import Engine

    from sparkdl.data import Store

_PLACE = "_initialize_tables"


class TablesMadeOnce:
    """Copies MLflow's tables of the first SQLite file to later ones; running all migrations takes a second."""

    def __init__(self, make: Callable[[Engine], None]) -> None:
        self._make = make
        self._first: bytes | None = None

    def __call__(self, engine: Engine) -> None:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        try:
            self._copy_or_make(engine)
        finally:
            # Migrations configure logging again, and pytest's caplog would no longer see anything.
            root.handlers[:] = handlers
            root.setLevel(level)

    def _copy_or_make(self, engine: Engine) -> None:
        file = Path(engine.url.database or "")
        # Some versions of MLflow initialize a file again that holds runs.
        if engine.dialect.name != "sqlite" or (file.is_file() and file.stat().st_size):
            self._make(engine)
            return
        if self._first is None:
            self._make(engine)
            engine.dispose()
            self._first = file.read_bytes()
        else:
            engine.dispose()
            file.write_bytes(self._first)


def unset_tracking_uri() -> None:
    """Reset MLflow's tracking URI; version 2.19 keeps the last one in the environment."""
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_TRACKING_URI", None)


def open_run(mode: str, *, store: Store, **options: Any) -> AbstractContextManager[FitRun | None]:
    """The run of a fit as an estimator opens it, with these options and the defaults of Params."""
    if not is_tracking(mode):
        return nullcontext()
    return FitRun(store, **{"experiment": None, "run_name": None, "wait_s": 30.0, **options})


_make_tables = TablesMadeOnce(getattr(databases, _PLACE))


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """MLflow as an unconfigured user has it, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    unset_tracking_uri()
    monkeypatch.setattr(databases, _PLACE, _make_tables)
    yield tmp_path
    while mlflow.active_run():
        mlflow.end_run()
    unset_tracking_uri()
