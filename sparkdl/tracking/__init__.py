"""Opens and fills the MLflow run of a fit, and writes logged models.

Runs on the *driver*; begin with ``run``. The ranks report to the driver and need no credentials. ``model_loader`` is
copied into logged models, and runs where a model is served.

Fits use mlflow only through this package, which imports mlflow when a run is opened. Users call :mod:`sparkdl.mlflow`.
"""

from __future__ import annotations

from sparkdl.tracking.kept_runs import SentRun, send_kept_runs
from sparkdl.tracking.logged_model import LoggedColumn, LoggedDataset, LoggedModelSpec, Registration
from sparkdl.tracking.model_code import models_with_code
from sparkdl.tracking.run import (
    FitRun,
    RunGroup,
    TrackingMode,
    add_to_run,
    is_tracking,
    metrics_of_active_run,
    open_run,
    runs_with_files,
)
from sparkdl.tracking.start import context_tags, use_tracking_uri, without_credentials

__all__ = [
    "FitRun",
    "LoggedColumn",
    "LoggedDataset",
    "LoggedModelSpec",
    "Registration",
    "RunGroup",
    "SentRun",
    "TrackingMode",
    "add_to_run",
    "context_tags",
    "is_tracking",
    "metrics_of_active_run",
    "models_with_code",
    "open_run",
    "runs_with_files",
    "send_kept_runs",
    "use_tracking_uri",
    "without_credentials",
]
