"""The start of a fit's run: opened, nested under another run, or joined.

:func:`describe_start` collects the description of a run on the caller's thread, without contacting the server.
:func:`begin_run` contacts the server, on the thread of the sender, or later for runs that were kept.

A program reports to the MLflow server or store that is set. If none is set, :func:`choose_store` sets ``mlflow.db`` in
the working directory. :func:`without_credentials` removes users and passwords from a URI before it is written to a log
or a file.

:func:`current_switches` returns the options of :func:`sparkdl.autolog` for fits.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import how_to_install

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow import MlflowClient
    from mlflow.entities import Run


KEY_TAG = "mlflow.sparkdl.run_key"
"""Tag with the key of a run's fit, which finds the run where its id is not known; MLflow hides tags of this prefix."""

CONTINUED_TAG = "sparkdl.continues_run"
"""Tag with the id of the finished run whose fit a fit continues in a run of its own."""

PARENT_TAG = "mlflow.parentRunId"
"""MLflow's tag with the id of the run under which a run is nested."""

_DEFAULT_STORE = "mlflow.db"


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The description of a run before the server has created it; it can be stored as JSON.

    Attributes:
        key: key that identifies the run until it has an id; a fit that is continued has the key of its earlier run.
        experiment: name of the experiment, which is created if missing; None for the one with `experiment_id`.
        experiment_id: id of the experiment; None for MLflow's active experiment.
        name: name of the run; MLflow generates one if None.
        tags: tags of the run, including those that MLflow sets for user and source.
        start_time: start of the run, in milliseconds since 1970.
        active: id of the run that was active on the caller's thread; None if there was none.
        may_join: whether the fit is logged to the active run if that run holds no other fit; otherwise it gets a nested
            run.
        parent_key: key of the run under which this run is nested, instead of the active one; None for the active one.
    """

    key: str
    experiment: str | None = None
    experiment_id: str | None = None
    name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    start_time: int = 0
    active: str | None = None
    may_join: bool = True
    parent_key: str | None = None


def describe_start(
    *, experiment: str | None, tags: Mapping[str, str], active: Run | None, key: str | None, **others: Any
) -> RunStart:
    """Describe a run that is opened on this thread.

    Args:
        experiment: name of the experiment; None for MLflow's active experiment. Ignored if a run is active.
        tags: tags of the run, in addition to those that MLflow derives from the context.
        active: the user's run that the run joins, or under which it is nested; None for none.
        key: key of the run that the fit continues, if the server still has it; None for a new one.
        others: further attributes of the description.
    """
    from mlflow.tracking.fluent import _get_experiment_id

    key = key or uuid.uuid4().hex
    experiment_id = None if active is None else active.info.experiment_id
    if experiment is None and experiment_id is None and "DATABRICKS_RUNTIME_VERSION" in os.environ:
        experiment_id = _get_experiment_id()  # the experiment of the notebook; other threads may not know it
    return RunStart(
        key=key,
        experiment=experiment if active is None else None,
        experiment_id=experiment_id,
        tags={**context_tags(tags), KEY_TAG: key},
        start_time=int(time.time() * 1000),
        active=None if active is None else active.info.run_id,
        **others,
    )


def context_tags(tags: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return tags and those that MLflow derives from where this process runs, such as its program and user."""
    from mlflow.tracking.context.registry import resolve_tags

    return dict(resolve_tags(dict(tags or {})))


@dataclass(frozen=True)
class BegunRun:
    """A run that exists on the server.

    Attributes:
        run_id: MLflow's id of the run.
        is_joined: whether the user has opened the run, and will end it.
        is_continued: whether the run may already have metrics of the fit.
        name: name of the run.
        experiment_id: id of its experiment; None if it is not known.
    """

    run_id: str
    is_joined: bool = False
    is_continued: bool = False
    name: str | None = None
    experiment_id: str | None = None


def begin_run(client: MlflowClient, start: RunStart, parent_id: str | None = None) -> BegunRun:
    """Open a run, join the active one, or continue the one with the key of the fit, unless that was deleted.

    A run that had finished before the fit began stays as it is: the fit gets a run of its own, with the tag
    ``sparkdl.continues_run``.

    Args:
        client: client of the MLflow server.
        start: description of the run.
        parent_id: id of the run with the key ``start.parent_key``; None if there is none.

    Raises:
        Exception: any exception of MLflow, if the run cannot be opened.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    if start.active is not None:
        active = client.get_run(start.active)
        if active.info.lifecycle_stage == "deleted":
            raise MlflowException(
                f"The active run {start.active} is deleted. Restore it, or end it by mlflow.end_run() and fit again.",
                INVALID_PARAMETER_VALUE,
            )
        held = active.data.tags.get(KEY_TAG)
        # A fit that continues joins the run that it had joined.
        if held == start.key or (start.may_join and held is None):
            client.set_tag(start.active, KEY_TAG, start.key)
            return BegunRun(
                start.active,
                is_joined=True,
                is_continued=held is not None,
                name=active.info.run_name,
                experiment_id=active.info.experiment_id,
            )
    experiment_id = _experiment_id(client, start)
    parent = parent_id or start.active
    before = find_run(client, [experiment_id], start.key)
    is_finished = (
        before is not None and before.info.status == "FINISHED" and before.info.start_time < start.start_time
    )
    if before is not None and not is_finished:
        # The run of an earlier attempt of the fit, or the response to the run's creation was lost.
        client.update_run(before.info.run_id, status="RUNNING")
        if parent is not None:
            client.set_tag(before.info.run_id, PARENT_TAG, parent)
        return BegunRun(
            before.info.run_id, is_continued=True, name=before.info.run_name, experiment_id=experiment_id
        )
    tags = {
        **start.tags,
        **({} if parent is None else {PARENT_TAG: parent}),
        **({} if before is None else {CONTINUED_TAG: before.info.run_id}),
    }
    run = client.create_run(experiment_id, start_time=start.start_time, tags=tags, run_name=start.name)
    return BegunRun(run.info.run_id, name=run.info.run_name, experiment_id=experiment_id)


def find_run(client: MlflowClient, experiment_ids: list[str], key: str) -> Run | None:
    """Return the newest run with a key; None if the experiments have none."""
    runs = client.search_runs(
        experiment_ids, f"tags.`{KEY_TAG}` = '{key}'", max_results=1, order_by=["attributes.start_time DESC"]
    )
    return runs[0] if runs else None


def _experiment_id(client: MlflowClient, start: RunStart) -> str:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking.fluent import _get_experiment_id

    if start.experiment is None:
        return str(start.experiment_id or _get_experiment_id())
    experiment = client.get_experiment_by_name(start.experiment)
    if experiment is None:
        try:
            return str(client.create_experiment(start.experiment))
        except MlflowException:
            experiment = client.get_experiment_by_name(start.experiment)  # another fit has created it
            if experiment is None:
                raise
    return str(experiment.experiment_id)


def choose_store() -> None:
    """Set MLflow's tracking URI to ``mlflow.db`` in the working directory, unless one is set."""
    import mlflow

    if mlflow.is_tracking_uri_set() or "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return
    if mlflow.active_run() is not None:  # the active run is in MLflow's default store
        return
    # MLflow 2 writes to ./mlruns by default, and MLflow 3 too if that folder has runs.
    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd() / _DEFAULT_STORE}")


@contextmanager
def without_notes_of_mlflow() -> Iterator[None]:
    """Drop what MLflow notes on this thread about its tables and its checks; warnings stay.

    A store of SQLite gets its tables when its first run is opened, while the first epochs are shown.
    """
    thread = threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.WARNING

    loggers = [logging.getLogger(name) for name in _NOTING_LOGGERS]
    for logger in loggers:
        logger.addFilter(is_kept)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_kept)


_NOTING_LOGGERS = (
    "mlflow.store.db.utils",
    "alembic.runtime.migration",
    "alembic.runtime.plugins",
    "mlflow.pyfunc",
)

# In URLs of databases a password ends at the @, as in SQLAlchemy; in those of servers the host ends at the first slash.
_USER_AND_PASSWORD = re.compile(
    r"(?P<scheme>https?://)(?:[^\s/?#@]*@)+"
    r"|(?P<database>\b(?!https?:)[a-z][\w+.-]*://)[^\s:/?#@]*(?::[^\s@]*)?@(?:[^\s/?#@]*@)*",
    re.IGNORECASE,
)
_PASSWORD_IN_QUERY = re.compile(r"(?P<name>[?&](?:password|passwd|token)=)[^\s&#]*", re.IGNORECASE)

_VARIABLE = "MLFLOW_TRACKING_URI"
_one_at_a_time = threading.RLock()


def without_credentials(text: str) -> str:
    """Return a URI, or a text that may contain URIs, without users and passwords."""
    bare = _USER_AND_PASSWORD.sub(lambda found: found["scheme"] or found["database"], text)
    return _PASSWORD_IN_QUERY.sub(lambda found: found["name"], bare)


def use_tracking_uri(uri: str) -> None:
    """Set the server or store that MLflow reports to, as ``mlflow.set_tracking_uri`` does.

    Raises:
        ParamError: if mlflow is not installed.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise ParamError(
            f"A fit is to be tracked at {without_credentials(uri)}, and mlflow is not installed. "
            f"{how_to_install('mlflow', 'mlflow')}"
        )
    import mlflow

    mlflow.set_tracking_uri(uri)


@contextmanager
def reporting_to(uri: str) -> Iterator[None]:
    """Set the tracking URI of the process for functions of MLflow that take no URI; one thread at a time.

    The previous URI is restored afterwards, unless the user has set another one meanwhile.
    """
    import mlflow

    with _one_at_a_time:
        before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        variable = os.environ.get(_VARIABLE)
        if before == uri:
            yield
            return
        mlflow.set_tracking_uri(uri)
        try:
            yield
        finally:
            if mlflow.get_tracking_uri() == uri:
                mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None unsets it
                # MLflow sets the environment variable, too; 2.19 does not restore it.
                if variable is None:
                    os.environ.pop(_VARIABLE, None)
                else:
                    os.environ[_VARIABLE] = variable


def with_known_credentials(uri: str) -> str:
    """Return the tracking URI of the process if it equals a URI except for user and password; else the given URI."""
    import mlflow

    current = mlflow.get_tracking_uri()
    return current if without_credentials(current) == uri else uri


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Options of :func:`sparkdl.autolog`, which documents them. The defaults hold if it was not called."""

    log_models: bool = True
    log_input_examples: bool = True
    log_model_signatures: bool = True
    log_datasets: bool = True
    disable: bool = False
    exclusive: bool = False
    silent: bool = False
    every_n_iter: int = 1
    registered_model_name: str | None = None
    extra_tags: Mapping[str, str] | None = field(default=None)


autologged: dict[str, Any] = {}
"""Arguments of the last call of :func:`sparkdl.autolog` in this process."""


def current_switches() -> Switches:
    """Return the options of the last call of ``sparkdl.autolog``; the defaults if it was not called."""
    return Switches(**autologged)
