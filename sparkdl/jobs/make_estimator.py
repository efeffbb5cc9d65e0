"""Makes the estimator of a job, checks its Params before Spark starts, and computes the size of its model.

The size is the memory that a model and its optimizer take on a rank; computing it allocates none of that memory.
"""

from __future__ import annotations

import copy
import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml.param import TypeConverters
from torch import nn

from sparkdl.errors import JobFileError, ParamError
from sparkdl.jobs.imports import call_named, named_object
from sparkdl.jobs.job import describe
from sparkdl.networks.initial_weights import seeded
from sparkdl.training.update import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.ml.param import Param
    from torch import Tensor

    from sparkdl.jobs.job import Job
    from sparkdl.jobs.yaml_tree import Entry
    from sparkdl.training.spec import OptimizerFactory


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


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a rank holds of a model, in bytes, beside what its layers compute.

    Attributes:
        num_parameters: how many numbers are trained or frozen.
        weights: parameters and buffers.
        gradients: of the parameters that are trained.
        optimizer: state of the optimizer after a step; None where that cannot be told without memory.
    """

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int | None

    @property
    def total(self) -> int:
        """All of it that is known."""
        return self.weights + self.gradients + (self.optimizer or 0)


def model_size(module: nn.Module, optimizer: OptimizerFactory) -> ModelSize:
    """Return how large a model is."""
    parameters = list(module.parameters())
    return ModelSize(
        num_parameters=sum(each.numel() for each in parameters),
        weights=_num_bytes((*parameters, *module.buffers())),
        gradients=_num_bytes(each for each in parameters if each.requires_grad),
        optimizer=_optimizer_bytes(module, optimizer),
    )


def _optimizer_bytes(module: nn.Module, factory: OptimizerFactory) -> int | None:
    """Have the optimizer take a step on tensors without memory, and add up what it keeps."""
    try:
        with torch.device("meta"):
            light = copy.deepcopy(module, _without_memory(module)).to("meta")
        made = make_optimizer(factory, light)
        for parameter in light.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        made.step()
    except Exception:  # an optimizer that looks at numbers, or a module that cannot be copied
        return None
    return _num_bytes(
        value for state in made.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )


def _without_memory(module: nn.Module) -> dict[int, object]:
    """What ``deepcopy`` takes for the tensors of a module: tensors like them, of which only the form is there."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = torch.nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return memo


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors if not each.is_sparse)
