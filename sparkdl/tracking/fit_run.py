"""The MLflow run of one fit: opened or joined, filled, and ended as the fit ended. Runs on the *driver*.

A fit tells its run what happens and goes on; a thread (:mod:`sparkdl.tracking.sender`) does the talking. At the end the
fit waits until all is sent, for a stated time. What is not sent by then is kept (:mod:`sparkdl.tracking.kept_runs`).
"""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

from sparkdl.errors import ParamError
from sparkdl.tracking.mlflow_run import MlflowRun
from sparkdl.tracking.run_start import choose_store
from sparkdl.tracking.switches import Switches, current_switches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from sparkdl.tracking.kept_runs import Shelf
    from sparkdl.tracking.logged_dataset import LoggedDataset
    from sparkdl.tracking.logged_model import LoggedModelSpec
    from sparkdl.tracking.registering import Registration
    from sparkdl.tracking.run_start import GroupOfRuns

TrackingMode = Literal["auto", "on", "off"]

WAIT_S = 30.0
"""How long a fit waits at its end until all is sent, beside what its model takes."""


class FitRun(Protocol):
    """Where a fit writes down what it does; nothing here waits for a server, but for :meth:`flush`."""

    switches: Switches

    @property
    def is_tracked(self) -> bool:
        """Whether anything is written down."""

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None without tracking, and as long as the server has not told."""

    @property
    def model_uri(self) -> str | None:
        """URI of the logged model; None where the server has not taken one."""

    def log_params(self, params: Mapping[str, object]) -> None:
        """Write down Params, cut to the length that MLflow takes."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down metrics; those that are no numbers are left out."""

    def log_file(self, path: str, content: bytes) -> None:
        """Write a small file into the artifacts of the run."""

    def log_folder(self, path: str, folder: Path) -> None:
        """Copy a local folder into the artifacts of the run; it has to stay until the run is closed."""

    def log_dataset(self, dataset: LoggedDataset) -> None:
        """Write down what was trained on."""

    def log_model(self, model: LoggedModelSpec, folder: Path, registration: Registration | None) -> None:
        """Log a saved model, for which files are written below a local folder that stays until the run is closed."""

    def flush(self) -> None:
        """Wait until all is sent, for as long as a fit waits."""


class NoRun:
    """The run of a fit that is not tracked."""

    switches = Switches()
    is_tracked = False
    run_id: str | None = None
    model_uri: str | None = None

    def log_params(self, params: Mapping[str, object]) -> None:
        """Do nothing."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def log_file(self, path: str, content: bytes) -> None:
        """Do nothing."""

    def log_folder(self, path: str, folder: Path) -> None:
        """Do nothing."""

    def log_dataset(self, dataset: LoggedDataset) -> None:
        """Do nothing."""

    def log_model(self, model: LoggedModelSpec, folder: Path, registration: Registration | None) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""


def is_tracking(mode: TrackingMode) -> bool:
    """Return whether fits are tracked: for ``"auto"`` where mlflow is installed and autolog not disabled.

    Raises:
        ParamError: for ``"on"`` when mlflow is not installed.
    """
    if mode == "off":
        return False
    if importlib.util.find_spec("mlflow") is None:
        if mode == "on":
            raise ParamError(
                "Param tracking is 'on' and mlflow is not installed. Install mlflow, or set it to 'off'."
            )
        return False
    return mode == "on" or not current_switches().disable


@contextmanager
def open_run(
    mode: TrackingMode,
    *,
    shelf: Callable[[], Shelf],
    experiment: str | None = None,
    run_name: str | None = None,
    tags: Mapping[str, str] | None = None,
    group: GroupOfRuns | None = None,
    wait_s: float = WAIT_S,
) -> Iterator[FitRun]:
    """Open the run of a fit, or join the one that is active; end it as the fit ends.

    A run that was active before stays open. A run that already holds the Params of an earlier fit is not
    written over: the fit then gets a nested run. Where MLflow has no tracking URI (no
    ``MLFLOW_TRACKING_URI``, no ``set_tracking_uri``, not on Databricks) it is set to the SQLite store
    ``mlflow.db`` in the working directory. A server that does not answer costs warnings.

    Args:
        mode: ``"on"``, ``"off"``, or ``"auto"``: on when mlflow is installed.
        shelf: gives the place for what cannot be sent.
        experiment: name of the experiment, made when it is not there; MLflow's active one when None.
        run_name: name of a new run; MLflow makes one up when None.
        tags: of a new run.
        group: of runs that this one is nested in.
        wait_s: how long to wait for the server at the end, beside the time of what is large.

    Raises:
        ParamError: for ``"on"`` when mlflow is not installed.
    """
    if not is_tracking(mode):
        yield NoRun()
        return
    choose_store()
    run = MlflowRun(
        shelf, experiment=experiment, run_name=run_name, tags=tags or {}, group=group, wait_s=wait_s
    )
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        run.close(status)
