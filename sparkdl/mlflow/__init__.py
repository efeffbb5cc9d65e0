"""The MLflow flavor of sparkdl: one logged model, three ways to load it. Runs on the *driver*, and where it is served.

========================================  ==================================================================
``sparkdl.mlflow.load_model(uri)``        a :class:`~sparkdl.estimators.TorchModel` of Spark ML, or one of the
                                          classes derived from it
``sparkdl.mlflow.load_module(uri)``       the ``torch.nn.Module``; needs no Spark
``mlflow.pyfunc.load_model(uri)``         the pyfunc: pandas in, pandas out; needs no Spark and no Java
========================================  ==================================================================

``fit`` logs its model with this flavor; :func:`log_model` and :func:`save_model` do so for a model that was loaded, or
fitted without tracking. :func:`autolog` sets what fits log; :func:`send_kept` sends what could not be sent to a server.
Begin with ``flavor``. Importing this module imports neither pyspark nor torch.
"""

from __future__ import annotations

from sparkdl.mlflow.flavor import autolog, load_model, load_module, log_model, save_model, send_kept

__all__ = ["autolog", "load_model", "load_module", "log_model", "save_model", "send_kept"]
