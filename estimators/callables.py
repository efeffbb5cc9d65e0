"""Checks Params that hold functions, and says what to give in the place of a class or an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from pyspark.ml.param import Param


def check_callable(param: Param[Any], given: object) -> None:
    """Check that a Param holds something that can be called, and no class.

    Raises:
        ParamError: naming the Param, what it is, and what it has to be.
    """
    if isinstance(given, type):
        name = _name(given)
        if issubclass(given, nn.Module):
            raise ParamError(f"Param {param.name} is the class {given.__name__}; give an instance: {name}().")
        raise ParamError(f"Param {param.name} is the class {given.__name__}: {param.doc}.")
    if not callable(given):
        raise ParamError(f"Param {param.name} is {type(given).__name__}: {param.doc}.")


def check_optimizer(param: Param[Any], given: object) -> None:
    """Check a function of parameters that makes an optimizer; a class of optimizers is one.

    Raises:
        ParamError: naming what it is instead, and a function for an optimizer that was made already.
    """
    if isinstance(given, type) and issubclass(given, Optimizer):
        return  # called with the parameters it makes one with its own defaults, or is refused when it is tried
    if isinstance(given, Optimizer):
        rate = given.defaults.get("lr")
        options = f", lr={float(rate):g}" if rate is not None else ""
        raise ParamError(
            f"Param {param.name} is an instance of {type(given).__name__}, and each rank makes its own, for its copy "
            f"of the model. Give a function: lambda parameters: {_name(type(given))}(parameters{options})."
        )
    check_callable(param, given)


def _name(kind: type) -> str:
    """How a user most likely writes a class."""
    if kind.__module__.startswith("torch.nn."):
        return f"nn.{kind.__name__}"
    if kind.__module__.startswith("torch.optim."):
        return f"torch.optim.{kind.__name__}"
    return kind.__name__
