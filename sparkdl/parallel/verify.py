"""Comparison of what ranks must have alike: the rows that they share, and tensors that each of them has whole.

Ranks exchange a sketch of a tensor, 64 numbers in place of all elements. The distance between two sketches estimates
the distance between the tensors, also if the same rows come in another order. Source: M. Charikar, K. Chen and
M. Farach-Colton, "Finding Frequent Items in Data Streams" (2002).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.parallel.collectives import local_part
from sparkdl.torch.submission import not_compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

_BUCKETS = 64

INPUTS = 1e-3
GRADIENTS = 10.0
"""Factors of the rounding that is allowed: ranks read inputs, but sum the contributions to gradients up."""


def sketch(tensor: Tensor, slack: float = 1.0) -> Tensor:
    """Return the sketch of a tensor and the distance that rounding may cause, as 65 numbers of float64.

    Different kinds of processors may round differently; integers have to be equal. Sketches can be added up.

    Args:
        tensor: this rank's values.
        slack: factor of the distance that rounding may cause, which is 1 percent of the tensor's 2-norm, or 5 percent
            for dtypes of 16 bits and less.
    """
    tensor = local_part(tensor.detach())
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    is_wide = tensor.dtype in (torch.float32, torch.float64)
    flat = (tensor if is_wide else tensor.double()).flatten()
    flat = flat.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)  # masks hold infinities
    signed = nn.functional.pad(flat * _signs(flat), (0, -len(flat) % _BUCKETS))
    sums = signed.view(-1, _BUCKETS).sum(0, dtype=torch.float64)
    rounding = slack * (0.01 if is_wide else 0.05) if tensor.is_floating_point() else 0.0
    allowed = rounding * torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.cat([sums, allowed.view(1)])


def _signs(flat: Tensor) -> Tensor:
    """1 or -1 for each element, as a hash of its number says."""
    numbers = torch.arange(len(flat), device=flat.device)
    for factor in (0x45D9F3B, 0x119DE1F3):
        numbers = (numbers ^ (numbers >> 16)) * factor & 0xFFFFFFFF
    return ((numbers >> 15 & 1) * 2 - 1).to(flat.dtype)


def differing(sketches: Sequence[Tensor | None], group: dist.ProcessGroup) -> list[bool]:
    """Whether each of several tensors differs between ranks, by their sketches. Collective.

    Args:
        sketches: results of :func:`sketch`; None for a tensor that this rank does not have.
        group: process group of the ranks.
    """
    absent = torch.full((_BUCKETS + 1,), -torch.inf, dtype=torch.float64)
    found = next((each.device for each in sketches if each is not None), None)
    device = device_of_counts(found, group)
    own = torch.stack([(absent if each is None else each).to(device) for each in sketches])
    sums, allowed = own[:, :-1], own[:, -1:]
    extremes = torch.cat([sums, torch.where(sums == -torch.inf, sums, -sums), allowed], 1)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes[:, :_BUCKETS], extremes[:, _BUCKETS:-1]
    distance = torch.linalg.vector_norm((highest + lowest).clamp(min=0.0), dim=1)
    differs: list[bool] = (distance > extremes[:, -1].clamp(min=0.0)).tolist()
    return differs


def device_of_counts(device: torch.device | None, group: dist.ProcessGroup) -> torch.device:
    """The CPU if the group takes its tensors: reading counts from a GPU would wait for all that it has to do."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return device if device is not None and device.type == "cuda" else torch.device("cuda")


def check_rows(dimension: str, given: Sequence[Sequence[Any]], group: dist.ProcessGroup) -> None:
    """Check that the ranks of a group have the same rows. Collective.

    Args:
        dimension: kind of parallelism of the group.
        given: lists of what a step takes, whose tensors are compared; a list without tensors counts as one that this
            rank was not given.
        group: process group of the ranks that work on the same rows.

    Raises:
        ParamError: on all ranks, if a list differs between two ranks that have it.
    """
    if dist.get_world_size(group) == 1:
        return
    sketches = []
    for values in given:
        tensors = [each for each in values if isinstance(each, Tensor) and not each.is_meta]
        # The factors tell two tensors from the same two in another order.
        parts = [sketch(each, INPUTS) * (number + 1) for number, each in enumerate(tensors)]
        sketches.append(torch.stack(parts).sum(0) if parts else None)
    if any(differing(sketches, group)):
        raise ParamError(
            f"The {dimension}-parallel ranks of a group gave different inputs to the model, so that gradients would be "
            "wrong. Ranks along tensor, context and pipeline need the same rows in the same order: have each of them "
            "read the share of layout.row_reader, (index, number of shares), shuffled with the same seed."
        )


class _Unchecked:
    """Replaces the hook in a copy of a module: it belongs to a process group, which is not copied."""

    def _before(self, *_: Any) -> None: ...
    def check(self, *_: Any) -> None: ...


@not_compiled
class SameRows:
    """Checks in each call of a module for a backward pass that the ranks of a group give it the same tensors.

    A stage of a pipeline gets its rows from another one, and is first called with uninitialized memory: there, the
    pipeline calls :meth:`check` with the rows of the batch.

    Args:
        module: module that takes the rows.
        group: process group of the ranks that work on the same rows.
        dimension: kind of parallelism of the group.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, dimension: str) -> None:
        self._group, self._dimension = group, dimension
        if getattr(module, "is_pipeline_stage", False):
            module.__dict__.setdefault("checks_of_rows", []).append(self)
        else:
            module.register_forward_pre_hook(self._before, with_kwargs=True)

    def __reduce__(self) -> Any:
        return _Unchecked, ()

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.check([*args, *(kwargs[name] for name in sorted(kwargs))])

    def check(self, *given: Sequence[Any]) -> None:
        """Call :func:`check_rows`."""
        check_rows(self._dimension, given, self._group)
