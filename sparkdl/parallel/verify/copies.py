"""The checks of parameters that several ranks have, and that have to be equal there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from sparkdl.errors import ParamError
from sparkdl.parallel.verify.sketches import differing, sketch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from sparkdl.parallel.pipeline.tied import TiedParameter

    Copies = Mapping[str, Mapping[int, nn.Parameter]]

_compared = WeakIdKeyDictionary()
"""The parameters that :func:`check_equal` has compared."""


def check_equal(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, verify: bool | None) -> None:
    """Check that parameters are equal on all ranks of a group. Collective.

    Args:
        parameters: the parameters, in the same order on all ranks.
        group: process group of the ranks that average their gradients.
        verify: whether all of them are compared (True), none (False), or those that were not compared before (None).

    Raises:
        ParamError: on all ranks, if one differs.
    """
    if verify is False:
        return
    due = [number for number, parameter in enumerate(parameters) if verify or parameter not in _compared]
    for number in due:
        _compared[parameters[number]] = True
    differs = differing([sketch(parameters[number]) for number in due], group)
    if any(differs):
        number = due[differs.index(True)]
        raise ParamError(
            f"Parameter number {number}, of shape {tuple(parameters[number].shape)}, differs between ranks that "
            "average its gradients. Begin with the same weights on all ranks: seed them before the model is made, or "
            "call parallelize() with averaged=False, which gives them those of the first rank."
        )


def check_tied(
    ties: Sequence[TiedParameter],
    copies: Copies,
    group: dist.ProcessGroup,
    *,
    divisions: bool,
    values: bool,
) -> None:
    """Check copies of tied parameters. Collective.

    Args:
        ties: the parameters that several stages of a pipeline have.
        copies: this rank's copies, by the first name of the parameter and the number of the stage.
        group: process group of the ranks of the pipeline.
        divisions: whether to check that copies are divided alike, so that the gradients of their parts can be added.
        values: whether to check that copies, which are divided alike, are equal.

    Raises:
        ParamError: on all ranks, if copies differ.
    """
    if divisions:
        _check_divisions(ties, copies, group)
    if values:
        _check_values(ties, copies, group)


def _check_values(ties: Sequence[TiedParameter], copies: Copies, group: dist.ProcessGroup) -> None:
    parts = [next((sketch(parameter) for parameter in copies[tie.name].values()), None) for tie in ties]
    for tie, differs in zip(ties, differing(parts, group), strict=True):
        if differs:
            raise ParamError(
                f"{' and '.join(map(repr, tie.names))} are one parameter, and its copies differ between pipeline "
                "stages. Begin with the same weights on all ranks: seed them before the model is made."
            )


def _check_divisions(ties: Sequence[TiedParameter], copies: Copies, group: dist.ProcessGroup) -> None:
    here = {
        name: [str(getattr(parameter, "placements", "whole")) for parameter in copies_here.values()]
        for name, copies_here in copies.items()
    }
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, here, group=group)
    for tie in ties:
        ways = {way for divisions_there in of_ranks for way in divisions_there.get(tie.name, ())}
        if len(ways) > 1:
            raise ParamError(
                f"{' and '.join(map(repr, tie.names))} are one parameter, and pipeline stages divide it in "
                f"different ways: {' and '.join(sorted(ways))}. Divide an embedding by 'embedding_rowwise' and "
                "the head with its weights by 'colwise', or neither, and shard all stages or none."
            )
