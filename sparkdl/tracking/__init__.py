"""The MLflow run of a fit. Runs on the *driver*; the ranks report to the driver and need no credentials.

The only place that imports mlflow, and it does so when a run is opened.
"""

from __future__ import annotations

from sparkdl.tracking.fit_run import FitRun, NoRun, TrackingMode, open_run
from sparkdl.tracking.logged_model import LoggedColumn, LoggedModelSpec
from sparkdl.tracking.tracking_uri import use_tracking_uri

__all__ = [
    "FitRun",
    "LoggedColumn",
    "LoggedModelSpec",
    "NoRun",
    "TrackingMode",
    "open_run",
    "use_tracking_uri",
]
