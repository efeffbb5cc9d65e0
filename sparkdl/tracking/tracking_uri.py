"""Which MLflow server a program reports to. Runs on the *driver*."""

from __future__ import annotations

import importlib.util

from sparkdl.errors import ParamError


def use_tracking_uri(uri: str) -> None:
    """Have MLflow report to a server or store, as ``mlflow.set_tracking_uri`` does.

    Raises:
        ParamError: if mlflow is not installed.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise ParamError(f"A fit is to be tracked at {uri}, and mlflow is not installed. Install mlflow.")
    import mlflow

    mlflow.set_tracking_uri(uri)
