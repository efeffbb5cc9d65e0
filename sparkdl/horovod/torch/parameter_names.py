"""What Horovod requires of ``named_parameters``, and what it calls parameters that have no name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[torch.nn.Parameter, str]:
    """Give every parameter of an optimizer a name, the same on all ranks.

    Args:
        optimizer: whose parameters.
        named_parameters: the names, as ``model.named_parameters()`` gives them, also of parameters that the optimizer
            does not have; by position if None.

    Raises:
        ValueError: if names occur twice, or a parameter has none, in Horovod's words.
    """
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{group_number}.{number}"
            for group_number, group in enumerate(optimizer.param_groups)
            for number, parameter in enumerate(group["params"])
        }
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(duplicates)
        )
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names = {parameter: name for name, parameter in named if parameter in own}
    unnamed = [str(id(parameter)) for parameter in own if parameter not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            "Python object ids: " + ", ".join(unnamed)
        )
    return names
