"""How the run of a fit begins: opened anew, nested under another, or joined. Runs on the *driver*.

What a run begins with is found out on the caller's thread, without a word to the server; :func:`begin_run` does the
talking, from the thread that sends, and later for runs that were kept.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY_TAG = "sparkdl.run_key"
"""By which runs find each other that were begun without a server."""

_PARENT_TAG = "mlflow.parentRunId"
_DEFAULT_STORE = "mlflow.db"


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What is known of a run before the server knows of it; JSON holds it.

    Attributes:
        key: names it until it has an id.
        experiment: name of the experiment, made when it is not there; None for the one with `experiment_id`.
        experiment_id: of the experiment; None for MLflow's active one.
        name: of the run; MLflow makes one up when None.
        tags: of the run: who runs what, as MLflow notes it.
        start_time: in milliseconds.
        active: id of the run that was active on the caller's thread, if any.
        may_join: whether the fit goes into the active run where that has no params yet; else it is nested under it.
        parent_key: key of the run under which it is nested, in the place of the active one.
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


class GroupOfRuns(Protocol):
    """Runs that are nested under one.

    Attributes:
        active: the user's run that they are nested under, if there is one.
        key: else the key of the run that was begun for them.
    """

    active: Any
    key: str | None

    def parent_id(self) -> str:
        """Return the id of the run that they are nested in; may wait for the server."""


def describe_start(
    *,
    experiment: str | None,
    run_name: str | None,
    tags: Mapping[str, str],
    exclusive: bool,
    group: GroupOfRuns | None = None,
) -> RunStart:
    """Find out how a run that is begun on this thread begins.

    Args:
        experiment: name of the experiment.
        run_name: name of the run.
        tags: beside those that MLflow makes of the context.
        exclusive: whether a run that is active is left alone.
        group: that the run is one of.
    """
    import mlflow
    from mlflow.tracking.context.registry import resolve_tags
    from mlflow.tracking.fluent import _get_experiment_id

    key = uuid.uuid4().hex
    active: Any = None if exclusive else mlflow.active_run()
    if group is not None:
        active = group.active
    experiment_id = None if active is None else active.info.experiment_id
    if experiment is None and experiment_id is None and "DATABRICKS_RUNTIME_VERSION" in os.environ:
        experiment_id = _get_experiment_id()  # of the notebook, of which other threads may not know
    return RunStart(
        key=key,
        experiment=experiment if active is None else None,
        experiment_id=experiment_id,
        name=run_name,
        tags={**resolve_tags(dict(tags)), KEY_TAG: key},
        start_time=int(time.time() * 1000),
        active=None if active is None else active.info.run_id,
        may_join=group is None,
        parent_key=None if group is None else group.key,
    )


@dataclass(frozen=True)
class BegunRun:
    """A run that the server knows.

    Attributes:
        run_id: its id.
        is_joined: whether somebody else has opened it and will end it.
    """

    run_id: str
    is_joined: bool = False


def begin_run(client: MlflowClient, start: RunStart, parent_id: str | None = None) -> BegunRun:
    """Open or join the run.

    Args:
        client: of the server.
        start: of the run.
        parent_id: id of the run that ``start.parent_key`` names.

    Raises:
        Exception: what MLflow raises when the run cannot be opened.
    """
    if start.active is not None and start.may_join and not client.get_run(start.active).data.params:
        return BegunRun(start.active, is_joined=True)
    experiment_id = _experiment_id(client, start)
    before = find_run(client, [experiment_id], start.key)
    if before is not None:  # it was begun, and the answer got lost
        return BegunRun(before)
    parent = parent_id or start.active
    tags = {**start.tags, **({_PARENT_TAG: parent} if parent is not None else {})}
    run = client.create_run(experiment_id, start_time=start.start_time, tags=tags, run_name=start.name)
    return BegunRun(run.info.run_id)


def find_run(client: MlflowClient, experiment_ids: list[str], key: str) -> str | None:
    """Return the id of the run that was begun with a key; None if the experiments have none."""
    found = client.search_runs(experiment_ids, f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    return found[0].info.run_id if found else None


def _experiment_id(client: MlflowClient, start: RunStart) -> str:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking.fluent import _get_experiment_id

    if start.experiment is None:
        return str(start.experiment_id or _get_experiment_id())
    found = client.get_experiment_by_name(start.experiment)
    if found is None:
        try:
            return str(client.create_experiment(start.experiment))
        except MlflowException:
            found = client.get_experiment_by_name(start.experiment)  # another fit was faster
            if found is None:
                raise
    return str(found.experiment_id)


def choose_store() -> None:
    """Have MLflow write to ``mlflow.db`` in the working directory, where nobody has told it where to."""
    import mlflow

    if mlflow.is_tracking_uri_set() or "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return
    if mlflow.active_run() is not None:  # and lies where MLflow writes by itself
        return
    # MLflow 2 would write ./mlruns; MLflow 3 too, where that folder already holds runs.
    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd() / _DEFAULT_STORE}")
