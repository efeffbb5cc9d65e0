"""Opens and fills the MLflow run of a fit, and writes logged models.

Runs on the *driver*; begin with ``fit_run``. The ranks report to the driver and need no credentials. ``model_loader``
is copied into logged models, and runs where a model is served.

Fits use mlflow only through this package, which imports mlflow when a run is opened. Users call :mod:`sparkdl.mlflow`.
"""

from __future__ import annotations

from sparkdl.tracking.fit_run import (
    FitRun,
    RunGroup,
    add_to_run,
    is_tracking,
    log_of_active_run,
    log_with_fits,
)
from sparkdl.tracking.kept_runs import SentRun, send_kept_runs
from sparkdl.tracking.logged_model import LoggedColumn, LoggedDataset, LoggedModelSpec, Registration
from sparkdl.tracking.start import context_tags, use_tracking_uri, without_credentials

__all__ = [
    "FitRun",
    "LoggedColumn",
    "LoggedDataset",
    "LoggedModelSpec",
    "Registration",
    "RunGroup",
    "SentRun",
    "add_to_run",
    "context_tags",
    "is_tracking",
    "log_of_active_run",
    "log_with_fits",
    "send_kept_runs",
    "use_tracking_uri",
    "without_credentials",
]
