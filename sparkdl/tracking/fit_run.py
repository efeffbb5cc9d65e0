"""The MLflow run of one fit: opened or joined, filled, and ended as the fit ended. Runs on the *driver*."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from sparkdl.errors import ParamError
from sparkdl.tracking.flavor import FlavorOptions, log_flavor
from sparkdl.tracking.logged_model import LoggedModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlflow.entities import Metric

TrackingMode = Literal["auto", "on", "off"]

_MAX_PARAM_VALUE_LENGTH = 500  # of the oldest servers in use; MLflow 2.x and 3.x take 6000
_MAX_METRICS_PER_BATCH = 1000  # MLflow's own limit
_DEFAULT_STORE = "mlflow.db"

_logger = logging.getLogger(__name__)


class FitRun(Protocol):
    """Where a fit writes down what it does."""

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None without tracking."""

    def log_params(self, params: Mapping[str, object]) -> None:
        """Write down Params, cut to the length that MLflow takes."""

    def log_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write down metrics with ``step=epoch``. A server that fails costs a warning, not the fit.

        What it did not take is kept and sent once more, before the model is logged or the run ends.
        """

    def log_model(self, model: LoggedModelSpec) -> str | None:
        """Log a saved model and return its URI; None without tracking.

        Raises:
            Exception: what MLflow raises when its server or its artifact store does not take it.
        """


class NoRun:
    """The run of a fit that is not tracked."""

    run_id: str | None = None

    def log_params(self, params: Mapping[str, object]) -> None:
        """Do nothing."""

    def log_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def log_model(self, model: LoggedModelSpec) -> str | None:
        """Do nothing."""
        del model
        return None


@contextmanager
def open_run(
    mode: TrackingMode, *, experiment: str | None = None, run_name: str | None = None
) -> Iterator[FitRun]:
    """Open the run of a fit, or join the one that is active; end it as the fit ends.

    A run that was active before stays open. A run that already holds the Params of an earlier fit is not
    written over: the fit then gets a nested run. Where MLflow has no tracking URI (no
    ``MLFLOW_TRACKING_URI``, no ``set_tracking_uri``, not on Databricks) it is set to the SQLite store
    ``mlflow.db`` in the working directory. A run that MLflow cannot end costs a warning.

    Args:
        mode: ``"on"``, ``"off"``, or ``"auto"``: on when mlflow is installed.
        experiment: name of the experiment, made when it is not there; MLflow's active one when None.
        run_name: name of a new run; MLflow makes one up when None.

    Raises:
        ParamError: for ``"on"`` when mlflow is not installed.
        Exception: what MLflow raises when the run cannot be opened.
    """
    if mode == "off":
        yield NoRun()
        return
    if importlib.util.find_spec("mlflow") is None:
        if mode == "on":
            raise ParamError(
                "Param tracking is 'on' and mlflow is not installed. Install mlflow, or set it to 'off'."
            )
        yield NoRun()
        return
    with _open_mlflow_run(experiment, run_name) as run_id:
        run = _MlflowRun(run_id)
        try:
            yield run
        finally:
            run.close()


@contextmanager
def _open_mlflow_run(experiment: str | None, run_name: str | None) -> Iterator[str]:
    import mlflow

    _choose_store()
    active = mlflow.active_run()
    if active is not None and not mlflow.get_run(active.info.run_id).data.params:
        yield active.info.run_id
        return
    if experiment is not None and active is None:
        mlflow.set_experiment(experiment)
    run = mlflow.start_run(run_name=run_name, nested=active is not None)
    status = "FAILED"
    try:
        yield run.info.run_id
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        _end_run(run.info.run_id, status)


def _end_run(run_id: str, status: str) -> None:
    import mlflow

    try:
        mlflow.end_run(status)
    except Exception as error:  # not raised, as a trained model or the reason of a failure would be lost
        _logger.warning(
            "MLflow could not end the run %s, which it will show as running: %s. End it with "
            "mlflow.MlflowClient().set_terminated(%r, %r).",
            run_id,
            error,
            run_id,
            status,
        )


def _choose_store() -> None:
    import mlflow

    is_configured = mlflow.is_tracking_uri_set()
    if is_configured or "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return
    # MLflow 2 would write ./mlruns; MLflow 3 too, where that folder already holds runs.
    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd() / _DEFAULT_STORE}")


class _MlflowRun:
    def __init__(self, run_id: str) -> None:
        import mlflow

        self.run_id: str | None = run_id
        self._id = run_id
        self._client = mlflow.MlflowClient()
        self._kept: list[Metric] = []

    def log_params(self, params: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        cut = [Param(name, _cut(str(value))) for name, value in params.items()]
        self._client.log_batch(self._id, params=cut)

    def log_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(name, value, now, epoch) for name, value in metrics.items() if math.isfinite(value)]
        if self._kept:  # each failing call may take minutes, as MLflow tries it several times
            self._kept += batch
            return
        try:
            self._client.log_batch(self._id, metrics=batch)
        except Exception as error:
            self._kept += batch
            _logger.warning(
                "MLflow did not take the metrics of epoch %d: %s. They and those of later epochs will be sent at "
                "the end of the fit.",
                epoch,
                error,
            )

    def log_model(self, model: LoggedModelSpec) -> str | None:
        self.close()
        return str(log_flavor(model, FlavorOptions(), run_id=self._id).model_uri)

    def close(self) -> None:
        """Send the metrics that were kept, once; a server that does not take them costs a warning."""
        kept, self._kept = self._kept, []
        try:
            for start in range(0, len(kept), _MAX_METRICS_PER_BATCH):
                self._client.log_batch(self._id, metrics=kept[start : start + _MAX_METRICS_PER_BATCH])
        except Exception as error:
            _logger.warning(
                "The metrics of the epochs from %d are not in MLflow: %s. The model's history has them.",
                kept[0].step,
                error,
            )


def _cut(value: str) -> str:
    return value if len(value) <= _MAX_PARAM_VALUE_LENGTH else value[: _MAX_PARAM_VALUE_LENGTH - 3] + "..."
