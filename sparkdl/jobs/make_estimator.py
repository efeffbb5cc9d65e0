"""Makes the estimator of a job, and has it check its Params before Spark starts. Runs on the *driver*."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import TypeConverters
from torch import nn

from sparkdl.errors import JobFileError, ParamError
from sparkdl.jobs.imports import call_named, named_object
from sparkdl.jobs.section import describe
from sparkdl.networks.initial_weights import seeded
from sparkdl.training.update import make_optimizer

if TYPE_CHECKING:
    from pyspark.ml.param import Param

    from sparkdl.jobs.job import Job
    from sparkdl.jobs.yaml_tree import Entry

_FACTORIES = ("optimizer", "scheduler")
"""Params that take a function which makes something on each rank; a class is one."""

_NAMED_IN_ERRORS = re.compile(r"\b(?:Params?|Metric) (?:(\w+)\b|'([^']+)')")


def make_estimator(job: Job) -> Any:
    """Return the estimator with all Params of the job, whose values were checked as far as they can without rows.

    The first weights of a network that the job names are drawn by its ``seed``.

    Raises:
        JobFileError: naming file, line and Param.
    """
    estimator = getattr(importlib.import_module("sparkdl.estimators"), job.estimator)()
    for name, entry in job.params.items():
        _set(estimator, name, entry)
    if not isinstance(job.model.value, str):
        model = call_named(job.model, "model", seeded(estimator.getSeed()))
        if not isinstance(model, nn.Module):
            raise JobFileError(
                f"{job.model.place}: model: a torch.nn.Module is needed, and this makes a {type(model).__name__}."
            )
        estimator.setModel(model)
    try:
        estimator.check_values()
        if job.estimator == "TorchEstimator":
            make_optimizer(estimator.getOptimizer(), estimator.getModel())
    except ParamError as error:
        raise JobFileError(f"{_place_of(error, job)}: params: {error}") from error
    return estimator


def _set(estimator: Any, name: str, entry: Entry) -> None:
    value = entry.plain()
    if not estimator.hasParam(name):
        pass  # the estimator says which it has
    elif _holds_objects(estimator.getParam(name)):
        value = named_object(entry, f"params.{name}", makes_instances=name not in _FACTORIES)
    elif isinstance(entry.value, dict):
        raise JobFileError(
            f"{entry.place}: params.{name}: {describe(entry.value)} is none of the values it takes."
        )
    try:
        estimator.setParams(**{name: value})
    except ParamError as error:
        raise JobFileError(f"{entry.place}: params.{name}: {error}") from error


def _holds_objects(param: Param[Any]) -> bool:
    return param.typeConverter is TypeConverters.identity


def _place_of(error: ParamError, job: Job) -> Any:
    """The line of the first Param that an error names, or where Params are said."""
    for match in _NAMED_IN_ERRORS.finditer(str(error)):
        entry = job.params.get(match[1] or "metrics")
        if entry is not None:
            return entry.place
    return job.params_place
