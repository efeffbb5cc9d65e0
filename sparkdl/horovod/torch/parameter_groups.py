"""Which gradients ``hvd.DistributedOptimizer`` reduces as one operation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

Groups = int | Sequence[Sequence[torch.Tensor]] | None


def check_groups(groups: Groups) -> None:
    """Check what was given as ``groups``.

    Raises:
        ValueError: in Horovod's words, if it is neither a positive number nor lists of distinct tensors.
    """
    if groups is None:
        return
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    if not isinstance(groups, (list, tuple)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    entries = [entry for group in groups for entry in group]
    if any(not isinstance(entry, torch.Tensor) for entry in entries):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(entry) for entry in entries}) < len(entries):
        raise ValueError("A parameter can only appear once in groups.")


def form_groups(
    parameters: Sequence[torch.nn.Parameter], groups: Groups
) -> list[tuple[torch.nn.Parameter, ...]]:
    """Divide parameters into groups.

    Args:
        parameters: in the same order on all ranks.
        groups: None for groups of one; a number of groups of about equally many parameters; or lists, where
            parameters that are in none form groups of one.
    """
    if groups is None:
        return [(parameter,) for parameter in parameters]
    if isinstance(groups, int):
        least, remaining = divmod(len(parameters), groups)
        starts = [number * least + min(number, remaining) for number in range(groups + 1)]
        parts = [tuple(parameters[start:end]) for start, end in itertools.pairwise(starts)]
        return [part for part in parts if part]
    by_id = {id(parameter): parameter for parameter in parameters}
    listed = [tuple(by_id.pop(id(entry)) for entry in group if id(entry) in by_id) for group in groups]
    return [group for group in listed if group] + [(parameter,) for parameter in by_id.values()]
