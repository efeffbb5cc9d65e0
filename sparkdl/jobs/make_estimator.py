"""Makes the estimator of a job, checks its Params before Spark starts, and computes the size of its model.

The size is the memory that the model and its optimizer take on a rank. Computing it allocates none of that memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from sparkdl import estimators
from sparkdl.errors import JobFileError, ParamError
from sparkdl.jobs.imports import call_named, named_object
from sparkdl.random_state import seeded
from sparkdl.training.update import make_optimizer, optimizer_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from sparkdl.jobs.job import TrainingJob
    from sparkdl.jobs.yaml_tree import JobEntry
    from sparkdl.training.spec import OptimizerFactory


_FACTORIES = ("optimizer", "scheduler")
"""Params that take a function that each rank calls; the function may be a class."""

_NAMED = ("optimizer", "loss", "scheduler", "metrics")
"""Params whose values may be names that they know, such as ``adamw``, ``cross_entropy`` and ``accuracy``."""


def make_estimator(job: TrainingJob) -> Any:
    """Return the estimator with all Params of the job, checked as far as possible without rows.

    The initial weights of the job's network are drawn from its ``seed``.

    Raises:
        JobFileError: if a Param or the model is not valid; names file, line and Param.
    """
    estimator = getattr(estimators, job.estimator)()
    for name, entry in job.params.items():
        _set(estimator, name, entry)
    if not isinstance(job.model.value, str):
        model = call_named(job.model, "model", seeded(estimator.getSeed()))
        if not isinstance(model, nn.Module):
            raise JobFileError(
                f"{job.model.position}: model: this must make a torch.nn.Module, and makes a {type(model).__name__}."
            )
        estimator.setModel(model)
    try:
        estimator._check_values()
        if job.estimator == "TorchEstimator":
            try:
                make_optimizer(estimator.getOptimizer(), estimator.getModel())
            except ParamError as error:
                error.about("optimizer")
                raise
    except ParamError as error:
        named = [job.params[name].position for name in error.params if name in job.params]
        raise JobFileError(f"{[*named, job.params_position][0]}: params: {error}") from error
    return estimator


def _set(estimator: Any, name: str, entry: JobEntry) -> None:
    value = entry.plain()
    if not estimator.hasParam(name):
        pass  # setParams() raises, and names the existing Params
    elif estimator.getParam(name).holds_object:
        value = named_object(
            entry, f"params.{name}", makes_instances=name not in _FACTORIES, takes_names=name in _NAMED
        )
    try:
        estimator.setParams(**{name: value})
    except ParamError as error:
        raise JobFileError(f"{entry.position}: params.{name}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Memory of a model on a rank, in bytes, without activations.

    Attributes:
        num_parameters: number of parameters, trained and frozen.
        weights: bytes of parameters and buffers.
        gradients: bytes of the gradients of the trained parameters.
        optimizer: bytes of the optimizer's state after a step; None if it cannot be determined without allocating it.
    """

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int | None

    @property
    def total(self) -> int:
        """Sum of the known sizes, in bytes."""
        return self.weights + self.gradients + (self.optimizer or 0)


def model_size(module: nn.Module, optimizer: OptimizerFactory) -> ModelSize:
    """Return the size of a model with an optimizer."""
    parameters = list(module.parameters())
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weights=_num_bytes((*parameters, *module.buffers())),
        gradients=_num_bytes(parameter for parameter in parameters if parameter.requires_grad),
        optimizer=optimizer_bytes(module, optimizer),
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_sparse)
