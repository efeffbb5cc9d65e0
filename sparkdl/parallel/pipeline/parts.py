"""The parts between which a model can be cut into stages, and the costs that balance the stages."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from sparkdl.checkpoint.tensors import call_on_all_ranks
from sparkdl.errors import ParamError
from sparkdl.foreign_errors import errors_as
from sparkdl.model.architecture import count_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class PipelineParts:
    """The parts of a model in the order in which they compute.

    Attributes:
        before: names of the modules before the blocks; later stages replace them by modules that return their input.
        blocks: name of the list of blocks, a ``ModuleList`` or a ``Sequential``; empty for a ``Sequential`` that is the
            model itself.
        after: names of the modules after the blocks; earlier stages replace them in the same way.
    """

    before: tuple[str, ...]
    blocks: str
    after: tuple[str, ...]


def parts_of(module: nn.Module) -> PipelineParts:
    """The parts of a model, from its ``pipeline_parts``, the plan of a Hugging Face model, or a ``Sequential``.

    ``pipeline_parts`` may name, as the blocks, a module that has parts of its own.

    Raises:
        ParamError: if the model has none of these.
    """
    named = getattr(module, "pipeline_parts", None)
    if named is not None:
        before, blocks, after = named
        inner = module.get_submodule(blocks)
        if not isinstance(inner, nn.ModuleList | nn.Sequential):
            inner_parts = parts_of(inner)
            before = (*before, *(f"{blocks}.{name}" for name in inner_parts.before))
            after = (*(f"{blocks}.{name}" for name in inner_parts.after), *after)
            blocks = f"{blocks}.{inner_parts.blocks}"
        return PipelineParts(tuple(before), blocks, tuple(after))
    if type(module) is nn.Sequential:
        return PipelineParts((), "", ())
    located = hugging_face_model(module)
    if located is not None:
        outside, model = located
        plan = [f"{outside}{name}" for name in model.pp_plan or ()]
        modules = dict(module.named_modules())  # the plans of some models name modules that they do not have
        lists = [name for name in plan if isinstance(modules.get(name), nn.ModuleList)]
        if len(lists) == 1:
            prefix = lists[0].rpartition(".")[0]
            of_base = [name for name in plan if name.rpartition(".")[0] == prefix]
            at = of_base.index(lists[0])
            others = [name for name in plan if name not in of_base]
            return PipelineParts(tuple(of_base[:at]), lists[0], (*of_base[at + 1 :], *others))
    raise ParamError(
        f"{type(module).__name__} does not say how it can be cut into pipeline stages. Give it an attribute such as "
        "pipeline_parts = (['embedding'], 'blocks', ['norm', 'head']): modules before, the ModuleList of blocks, "
        "modules after; or make it a torch.nn.Sequential of its layers."
    )


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a sequence of costs into contiguous stages so that the costliest stage is as cheap as possible.

    The smallest limit of a stage's cost is found by bisection: stages are filled up to a limit, one after the other.
    The limit is too small if that takes too many stages. Under the smallest limit, the stages get even shares, from the
    last one on.

    Args:
        costs: cost of each block; the costs of modules before and after the blocks are added to the first and the last.
        stages: number of stages; each gets at least one block.

    Returns:
        Index of the first block of each stage, followed by the number of blocks.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    largest, even = max(end - start for start, end in itertools.pairwise(sums)), sums[-1] / stages
    low, high = max(largest, math.nextafter(even, 0.0)), min(even + largest, sums[-1])
    while low < high:
        limit = min((low + high) / 2, math.nextafter(high, low))
        ends = _fill_parts(sums, limit)
        if len(ends) <= stages + 1:
            high = max(sums[end] - sums[start] for start, end in itertools.pairwise(ends))
        else:  # under a limit below all of these, stages would hold no more
            low = min(sums[end + 1] - sums[start] for start, end in itertools.pairwise(ends[:-1]))
    ends = _fill_parts(sums, high)
    firsts = [len(costs)]
    for before in range(stages - 1, 0, -1):
        end = firsts[-1]
        most = min(ends[min(before, len(ends) - 1)], end - 1)
        least = bisect.bisect_left(sums, -high, 0, end, key=lambda part: part - sums[end])
        even = bisect.bisect_right(sums, sums[end] * before / (before + 1)) - 1
        firsts.append(min(max(least, before, even), most))
    return [0, *reversed(firsts)]


def _fill_parts(sums: Sequence[float], limit: float) -> list[int]:
    """The number of blocks in the first stages, from none to all, if each stage takes as many as a limit allows."""
    ends = [0]
    while ends[-1] < len(sums) - 1:
        start = ends[-1]
        ends.append(bisect.bisect_right(sums, limit, start, key=lambda part: part - sums[start]) - 1)
    return ends


def costs_by_memory(module: nn.Module, parts: PipelineParts | None = None) -> list[float]:
    """Number of weights of each block; those before and after the blocks count with the first and the last block."""
    return _costs(module, parts or parts_of(module), lambda layer: float(count_parameters(layer)[0]))


def costs_by_time(
    module: nn.Module,
    *args: Any,
    group: dist.ProcessGroup,
    **kwargs: Any,
) -> list[float]:
    """Seconds of each block's forward pass on a batch: the fastest of three on the group's first rank. Collective.

    Args:
        module: the whole model, not on the meta device.
        args: positional arguments of the model.
        group: process group of the ranks that cut the model; all get the same costs.
        kwargs: keyword arguments of the model.

    Raises:
        ParamError: on all ranks, if the call fails.
    """

    def time_blocks() -> list[float]:
        if dist.get_rank(group) != 0:
            return []
        with errors_as(ParamError, "The blocks cannot be timed"):
            return _seconds_of_blocks(module, args, kwargs)

    costs, *_ = call_on_all_ranks(time_blocks, group)
    return costs


def _costs(module: nn.Module, parts: PipelineParts, cost_of: Callable[[nn.Module], float]) -> list[float]:
    """The cost of each block; the costs of modules before and after are added to the first and the last."""
    costs = [cost_of(block) for block in blocks_in(module, parts)]
    costs[0] += sum(cost_of(module.get_submodule(name)) for name in parts.before)
    costs[-1] += sum(cost_of(module.get_submodule(name)) for name in parts.after)
    return costs


def _seconds_of_blocks(module: nn.Module, args: Any, kwargs: Any) -> list[float]:
    parts = parts_of(module)
    layers = {*blocks_in(module, parts), *map(module.get_submodule, (*parts.before, *parts.after))}
    began: dict[nn.Module, float] = {}
    runs: list[defaultdict[nn.Module, float]] = []

    def begin(layer: nn.Module, *_: object) -> None:
        began[layer] = _now()

    def end(layer: nn.Module, *_: object) -> None:
        runs[-1][layer] += _now() - began[layer]

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(begin))
            hooks.enter_context(layer.register_forward_hook(end))
        for _ in range(_NUM_TIMED):
            runs.append(defaultdict(float))
            module(*args, **kwargs)
    return _costs(module, parts, lambda layer: min(run[layer] for run in runs))


_NUM_TIMED = 3
"""Number of calls of a model whose blocks are timed; the fastest time of each block counts."""


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a call only starts the GPU's work
    return time.perf_counter()


def blocks_in(module: nn.Module, parts: PipelineParts) -> nn.ModuleList | nn.Sequential:
    """The list of blocks of a model or a stage."""
    blocks = module.get_submodule(parts.blocks)
    assert isinstance(blocks, nn.ModuleList | nn.Sequential), "parts_of() names no other modules"
    return blocks


def hugging_face_model(module: nn.Module) -> tuple[str, Any] | None:
    """The Hugging Face model that a module is or contains, after the prefix of its names; None if there is none."""
    for name, layer in module.named_modules():
        if hasattr(type(layer), "pp_plan"):  # adapters of peft have it by proxy
            return f"{name}." if name else "", layer
    return None
