"""What Horovod requires of ``named_parameters``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch


def check_names(
    parameters: Sequence[torch.nn.Parameter],
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> None:
    """Check that every parameter of the optimizer has a name, and a name of its own.

    Raises:
        ValueError: otherwise, in Horovod's words.
    """
    if named_parameters is None:
        return
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
    named_ids = {id(parameter) for _, parameter in named}
    unnamed = [str(id(parameter)) for parameter in parameters if id(parameter) not in named_ids]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            "Python object ids: " + ", ".join(unnamed)
        )
