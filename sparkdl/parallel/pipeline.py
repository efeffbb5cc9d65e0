"""Pipeline parallelism: the layers of a model cut into stages, which work on small batches one after the other.

:func:`cut` keeps of a model what a rank's stages compute. :class:`Pipeline` runs a schedule of
``torch.distributed.pipelining`` over the stages.

Sources: Y. Huang et al., "GPipe" (2019); D. Narayanan et al., "PipeDream" (2019) and "Efficient Large-Scale Language
Model Training on GPU Clusters" (2021), for 1F1B and its interleaved form; P. Qi et al., "Zero Bubble Pipeline
Parallelism" (2023), for the zero-bubble schedules.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.parallel.parallelism import Parallelism


@dataclass(frozen=True)
class _Schedule:
    name: str
    stages_per_rank: int
    splits_backward: bool = False
    """Gradients of weights are computed later than those of inputs."""
    is_v: bool = False
    """Ranks have stages r and 2 N - 1 - r, in place of r and N + r."""


SCHEDULES = {
    "gpipe": _Schedule("GPipe", 1),
    "1f1b": _Schedule("1F1B", 1),
    "interleaved-1f1b": _Schedule("Interleaved1F1B", 2),
    "looped-bfs": _Schedule("LoopedBFS", 2),
    "zero-bubble": _Schedule("InterleavedZeroBubble", 2, splits_backward=True),
    "zbv": _Schedule("ZBVZeroBubble", 2, splits_backward=True, is_v=True),
    "dualpipe-v": _Schedule("DualPipeV", 2, splits_backward=True, is_v=True),
}
"""Schedules by name. All compute the same numbers; they differ in idle time and in the activations that are kept."""


def stages_of_rank(schedule: str, rank: int, ranks: int) -> list[int]:
    """The numbers of the stages that a rank of a pipeline has.

    Raises:
        ParamError: if there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise ParamError(f"There is no pipeline schedule {schedule!r}; there are {', '.join(SCHEDULES)}.")
    kind = SCHEDULES[schedule]
    if kind.is_v:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + number * ranks for number in range(kind.stages_per_rank)]


@dataclass(frozen=True)
class Parts:
    """The parts of a model in the order in which they compute.

    Attributes:
        before: names of modules before the blocks, which later stages replace by what passes their input on.
        blocks: name of the list of blocks, a ``ModuleList``, or a ``Sequential`` that is the model itself ("").
        after: names of modules after the blocks, which earlier stages replace likewise.
    """

    before: tuple[str, ...]
    blocks: str
    after: tuple[str, ...]


def parts_of(module: nn.Module) -> Parts:
    """The parts of a model: of its ``pipeline_parts``, of a Hugging Face model's plan, or of a ``Sequential``.

    Raises:
        ParamError: if they are not known.
    """
    given = getattr(module, "pipeline_parts", None)
    if given is not None:
        before, blocks, after = given
        return Parts(tuple(before), blocks, tuple(after))
    if type(module) is nn.Sequential:
        return Parts((), "", ())
    plan = getattr(module, "pp_plan", None)
    if plan:
        lists = [name for name in plan if isinstance(module.get_submodule(name), nn.ModuleList)]
        if len(lists) == 1:
            prefix = lists[0].rpartition(".")[0]
            inner = [name for name in plan if name.rpartition(".")[0] == prefix]
            at = inner.index(lists[0])
            outer = [name for name in plan if name not in inner]
            return Parts(tuple(inner[:at]), lists[0], (*inner[at + 1 :], *outer))
    raise ParamError(
        f"{type(module).__name__} does not say how it can be cut into pipeline stages. Give it an attribute such as "
        "pipeline_parts = (['embedding'], 'blocks', ['norm', 'head']): modules before, the ModuleList of blocks, "
        "modules after; or make it a torch.nn.Sequential of its layers."
    )


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a row of costs into contiguous stages so that the costliest stage is as cheap as possible.

    Args:
        costs: of each block; modules before and after count with the first and the last block.
        stages: how many there shall be; each has one block at least.

    Returns:
        The number of the first block of each stage, and the number of blocks.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][n]: the cost of the costliest of k stages over the first n blocks, and where the last one begins.
    best: list[list[tuple[float, int]]] = [[(0.0 if n == 0 else float("inf"), 0) for n in range(len(sums))]]
    for k in range(1, stages + 1):
        row = [(float("inf"), 0)] * k
        for n in range(k, len(sums)):
            row.append(min((max(best[k - 1][m][0], sums[n] - sums[m]), m) for m in range(k - 1, n)))
        best.append(row)
    ends = [len(costs)]
    for k in range(stages, 0, -1):
        ends.append(best[k][ends[-1]][1])
    return ends[::-1]


def costs_by_memory(module: nn.Module, parts: Parts | None = None) -> list[float]:
    """The number of weights of each block, the first and the last one with what comes before and after."""
    parts = parts or parts_of(module)
    costs = [_weights(block) for block in _blocks(module, parts)]
    costs[0] += sum(_weights(module.get_submodule(name)) for name in parts.before)
    costs[-1] += sum(_weights(module.get_submodule(name)) for name in parts.after)
    return costs


def costs_by_time(
    module: nn.Module,
    *args: Any,
    group: dist.ProcessGroup,
    parts: Parts | None = None,
    repeats: int = 3,
    **kwargs: Any,
) -> list[float]:
    """The seconds that each block takes forward on a small batch, as the first rank measures them. Collective.

    Args:
        module: the whole model, not on the meta device.
        args: what it is called with.
        group: the ranks that shall cut it alike.
        parts: of the model.
        repeats: how often it is called; the fastest call counts.
        kwargs: what it is called with by name.
    """
    parts = parts or parts_of(module)
    blocks = list(_blocks(module, parts))
    measured: list[list[float]] = [[0.0] * len(blocks)]
    if dist.get_rank(group) == 0:
        spans: list[float] = []
        starts: dict[int, float] = {}
        watched = [*(module.get_submodule(name) for name in parts.before), *blocks]
        watched += [module.get_submodule(name) for name in parts.after]
        handles = []
        for number, layer in enumerate(watched):
            handles.append(
                layer.register_forward_pre_hook(
                    lambda *_, n=number: starts.__setitem__(n, time.perf_counter())
                )
            )
            handles.append(layer.register_forward_hook(lambda *_: spans.append(time.perf_counter())))
        runs = []
        for _ in range(repeats):
            spans.clear()
            with torch.no_grad():
                module(*args, **kwargs)
            runs.append([end - starts[number] for number, end in enumerate(spans)])
        for handle in handles:
            handle.remove()
        fastest = [min(times) for times in zip(*runs, strict=True)]
        at = len(parts.before)
        costs = fastest[at : at + len(blocks)]
        costs[0] += sum(fastest[:at])
        costs[-1] += sum(fastest[at + len(blocks) :])
        measured = [costs]
    dist.broadcast_object_list(measured, src=dist.get_global_rank(group, 0), group=group)
    return measured[0]


def cut(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    schedule: str = "1f1b",
    costs: Sequence[float] | None = None,
    parts: Parts | None = None,
) -> list[nn.Module]:
    """Keep this rank's stages of a model.

    Args:
        module: the whole model, the same on all ranks or on the meta device. It is taken apart: do not use it again.
        group: the ranks of the pipeline, as ``layout.group("pipeline")``.
        schedule: of the :data:`SCHEDULES`.
        costs: of each block, by which the stages are balanced; :func:`costs_by_memory` if None.
        parts: of the model; :func:`parts_of` if None.

    Returns:
        The stages of this rank in ascending order; each takes what the one before returns. Modules keep their names,
        and blocks their numbers, so that checkpoints of all stages together are those of the whole model.

    Raises:
        ParamError: if there are fewer blocks than stages, or a parameter would lie on several stages.
    """
    parts = parts or parts_of(module)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = stages_of_rank(schedule, rank, ranks)
    num_stages = ranks * SCHEDULES[schedule].stages_per_rank
    firsts = check_cut(module, schedule, ranks, costs=costs, parts=parts)
    # A stage of its own is a copy of the shell around the modules that it keeps.
    stages = []
    for stage in own:
        shell = module if stage == own[-1] else _shallow_copy(module)
        stages.append(_keep(shell, parts, stage, num_stages, firsts))
        cast("Any", stages[-1]).is_pipeline_stage = (
            num_stages > 1
        )  # for those who would take it for the whole model
    return stages


def check_cut(
    module: nn.Module,
    schedule: str,
    ranks: int,
    *,
    costs: Sequence[float] | None = None,
    parts: Parts | None = None,
) -> list[int]:
    """Check that a model can be cut into the stages of a schedule; needs no process group.

    Args:
        module: the whole model.
        schedule: of the :data:`SCHEDULES`.
        ranks: of the pipeline.
        costs: see :func:`cut`.
        parts: of the model; :func:`parts_of` if None.

    Returns:
        The number of the first block of each stage, and the number of blocks.

    Raises:
        ParamError: see :func:`cut`.
    """
    parts = parts or parts_of(module)
    per_rank = len(stages_of_rank(schedule, 0, ranks))
    num_stages = ranks * per_rank
    blocks = _blocks(module, parts)
    if len(blocks) < num_stages:
        raise ParamError(
            f"{len(blocks)} blocks cannot be cut into {num_stages} pipeline stages ({ranks} ranks, schedule "
            f"{schedule!r}). Use at most {len(blocks) // per_rank} pipeline ranks, or a schedule with one stage per "
            "rank, such as '1f1b'."
        )
    costs = costs_by_memory(module, parts) if costs is None else costs
    if len(costs) != len(blocks):
        raise ParamError(f"There are {len(costs)} costs for {len(blocks)} blocks; give one for each block.")
    firsts = balance(costs, num_stages)
    _check_tied(module, parts, firsts)
    return firsts


def num_microbatches(sizes: Parallelism, rows: int) -> int:
    """Into how many small batches of equally many rows a pipeline cuts a batch; see :class:`Parallelism`.

    Args:
        sizes: resolved.
        rows: of a batch.

    Raises:
        ParamError: if there is no such number.
    """
    least = _least_microbatches(sizes.schedule, sizes.pipeline)
    if sizes.microbatches is not None:
        _check_microbatches(sizes.schedule, sizes.pipeline, sizes.microbatches)
        if rows % sizes.microbatches:
            raise ParamError(
                f"Batches of {rows} rows cannot be cut into {sizes.microbatches} small batches of equally many rows. "
                "Choose a batch size that is a multiple of microbatches."
            )
        return sizes.microbatches
    fits = [number for number in range(least, 4 * sizes.pipeline + 1) if rows % number == 0]
    if not fits:
        raise ParamError(
            f"Batches of {rows} rows cannot be cut into {least} to {4 * sizes.pipeline} small batches of equally many "
            f"rows, as {sizes.pipeline} pipeline ranks with the schedule {sizes.schedule!r} need them. Choose a batch "
            f"size such as {4 * sizes.pipeline}."
        )
    return fits[-1]


def _least_microbatches(schedule: str, ranks: int) -> int:
    return 2 * ranks if schedule == "dualpipe-v" else ranks if schedule == "1f1b" else 1


def _check_microbatches(schedule: str, ranks: int, microbatches: int) -> None:
    least = _least_microbatches(schedule, ranks)
    if microbatches < least:
        raise ParamError(
            f"The schedule {schedule!r} on {ranks} pipeline ranks needs at least {least} small batches, got "
            f"{microbatches}."
        )


class Pipeline:
    """The stages of this rank under a schedule.

    Args:
        stages: as :func:`cut` returned them, possibly divided and sharded since.
        group: the ranks of the pipeline.
        schedule: the one that they were cut for.
        microbatches: into how many small batches a batch is cut.
        loss: of the outputs of the last stage and the target of a small batch: their mean.
        sums: whether the losses of the small batches are added up to that of the batch, in place of averaged.
        device: of the tensors.

    Attributes:
        microbatches: likewise.
        rank_of_last: the rank of the last stage among all ranks.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        group: dist.ProcessGroup,
        *,
        schedule: str,
        microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        sums: bool = False,
        device: torch.device | None = None,
    ) -> None:
        kind = SCHEDULES[schedule]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        num_stages = ranks * kind.stages_per_rank
        _check_microbatches(schedule, ranks, microbatches)
        if kind.splits_backward and any(isinstance(stage, FSDPModule) for stage in stages):
            # torch 2.13 gives gradients that are wrong: FSDP2 reduces them before all are computed.
            names = [name for name, other in SCHEDULES.items() if not other.splits_backward]
            raise ParamError(
                f"The schedule {schedule!r} splits the backward pass, which FSDP2 does not support. Use one of "
                f"{', '.join(names)} with sharded stages, or average_gradients() in place of shard() for replicas."
            )
        self._group = group
        self.microbatches = microbatches
        numbers = stages_of_rank(schedule, rank, ranks)
        self._has_first = 0 in numbers
        self._has_last = num_stages - 1 in numbers
        self.rank_of_last = dist.get_global_rank(group, 0 if kind.is_v else ranks - 1)
        device = device or torch.device("cpu")
        wrapped = [
            PipelineStage(stage, number, num_stages, device, group=group)
            for stage, number in zip(stages, numbers, strict=True)
        ]
        parts = 1 if sums else microbatches
        made: Any = get_schedule_class(kind.name)
        # torch's own scaling divides what was accumulated before once more.
        self._schedule = made(
            wrapped if issubclass(made, PipelineScheduleMulti) else wrapped[0],
            microbatches,
            loss_fn=lambda output, target: loss(output, target) / parts,
            scale_grads=False,
        )

    def step(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Compute loss and gradients of a batch; gradients are added to those that there are. Collective.

        Args:
            args: what the model takes, with the rows of the batch first; used by the rank of the first stage.
            target: what the loss takes; used by the rank of the last stage.
            kwargs: what every stage takes by name, the same on all ranks.

        Returns:
            The mean loss of the batch, the same on all ranks, without gradients.
        """
        loss = self.run(*args, target=target, **kwargs)
        dist.broadcast(loss, self.rank_of_last, group=self._group)
        return loss

    def run(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Do as :meth:`step`, without telling the other ranks the loss: it is 0 where the last stage is not."""
        losses: list[Tensor] | None = [] if self._has_last else None
        self._schedule.step(
            *(args if self._has_first else ()),
            target=target if self._has_last else None,
            losses=losses,
            return_outputs=False,
            **kwargs,
        )
        return torch.stack(losses).sum().detach().float() if losses else torch.zeros(())


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_HEADER = 16
"""Numbers that say what a tensor is like: the number of its dtype, of its dimensions, and its shape."""


@torch.no_grad()
def evaluate_stages(
    stages: Sequence[nn.Module],
    group: dist.ProcessGroup,
    *args: Any,
    schedule: str,
    microbatches: int,
    **kwargs: Any,
) -> Tensor | None:
    """Compute the outputs of a batch without gradients. Collective.

    Args:
        stages: as :func:`cut` returned them.
        group: the ranks of the pipeline.
        args: what the model takes, tensors with the rows of the batch first; used by the rank of the first stage.
        schedule: the one that they were cut for.
        microbatches: into how many small batches the batch is cut, of one row at least.
        kwargs: what every stage takes by name, the same on all ranks.

    Returns:
        The outputs, on the rank of the last stage; None elsewhere.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    owners = {number: each for each in range(ranks) for number in stages_of_rank(schedule, each, ranks)}
    own = stages_of_rank(schedule, rank, ranks)
    outputs, sent = [], list[Any]()
    parts = [torch.tensor_split(each, microbatches) for each in args]
    named = {name: torch.tensor_split(each, microbatches) for name, each in kwargs.items()}
    for index in range(microbatches):
        given: tuple[Any, ...] = tuple(each[index] for each in parts)
        for number, stage in zip(own, stages, strict=True):
            if number and owners[number - 1] != rank:
                device = next((each.device for each in stage.parameters()), torch.device("cpu"))
                given = (_receive(owners[number - 1], group, device),)
            output = stage(*given, **{name: each[index] for name, each in named.items()})
            if number == len(owners) - 1:
                outputs.append(output)
            elif owners[number + 1] != rank:
                sent += _send(output, owners[number + 1], group)
            given = (output,)
    for work, _ in sent:
        work.wait()
    return torch.cat(outputs) if outputs else None


def _send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> list[tuple[Any, Tensor]]:
    """Begin to send a tensor and what it is like; keep what is returned until it is done."""
    tensor = tensor.contiguous()
    header = torch.zeros(_HEADER, dtype=torch.int64, device=tensor.device)
    known = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    header[: len(known)] = torch.tensor(known)
    return [(dist.isend(each, group=group, group_dst=to), each) for each in (header, tensor)]


def _receive(source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=source)
    kind, ndim, *shape = header.tolist()
    tensor = torch.empty(shape[:ndim], dtype=_DTYPES[kind], device=device)
    dist.recv(tensor, group=group, group_src=source)
    return tensor


def _blocks(module: nn.Module, parts: Parts) -> nn.ModuleList | nn.Sequential:
    blocks = module.get_submodule(parts.blocks)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise ParamError(
            f"The blocks {parts.blocks!r} of {type(module).__name__} must be a torch.nn.ModuleList or Sequential, they "
            f"are a {type(blocks).__name__}."
        )
    return blocks


def _weights(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))


def _check_tied(module: nn.Module, parts: Parts, firsts: Sequence[int]) -> None:
    """Refuse parameters that several stages would have: each would train its own."""
    stage_of: dict[nn.Parameter, tuple[int, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stage = _stage_of(name, parts, firsts)
        other, other_name = stage_of.setdefault(parameter, (stage, name))
        if other != stage:
            raise ParamError(
                f"{other_name!r} and {name!r} are one parameter, and lie on the pipeline stages {other} and {stage}. "
                "Give the model weights of its own for each (for a head that shares the embedding's: is_tied=False, or "
                "tie_word_embeddings=False in Hugging Face's configurations)."
            )


def _stage_of(name: str, parts: Parts, firsts: Sequence[int]) -> int:
    prefix = f"{parts.blocks}." if parts.blocks else ""
    if name.startswith(prefix):
        number = name.removeprefix(prefix).partition(".")[0]
        if number.isdigit():
            return max(stage for stage, first in enumerate(firsts[:-1]) if first <= int(number))
    if any(name == part or name.startswith(f"{part}.") for part in parts.after):
        return len(firsts) - 2
    return 0


class _Pass(nn.Module):
    """Stands for a module of another stage: passes its first argument on."""

    is_elsewhere = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return args[0] if args else next(iter(kwargs.values()))


class _OwnBlocks(nn.ModuleList):
    """Some of a list's blocks under their own numbers; runs through them, and counts as many."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(blocks)

    def __getitem__(self, index: Any) -> Any:
        own = list(self._modules.values())
        return own[index]

    def __iter__(self) -> Any:
        return iter(list(self._modules.values()))


class _OwnLayers(nn.Sequential):
    """Some of a Sequential's layers under their own numbers."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)


def _with_logits(shell: nn.Module, *, is_first: bool) -> nn.Module:
    """A Hugging Face model as a stage: a tensor in and a tensor out."""
    name, forward = "input_ids" if is_first else "inputs_embeds", shell.forward

    def take_tensor(tensor: Tensor, **kwargs: Any) -> Tensor:
        return forward(**{name: tensor}, use_cache=False, **kwargs).logits  # type: ignore[no-any-return]  # modules return Any

    shell.forward = take_tensor
    return shell


def _keep(shell: nn.Module, parts: Parts, stage: int, num_stages: int, firsts: Sequence[int]) -> nn.Module:
    kept = {str(number): _blocks(shell, parts)[number] for number in range(firsts[stage], firsts[stage + 1])}
    if not parts.blocks:
        return _OwnLayers(kept)
    _set(shell, parts.blocks, _OwnBlocks(kept))
    for names, is_kept in ((parts.before, stage == 0), (parts.after, stage == num_stages - 1)):
        for name in names:
            if not is_kept:
                _set(shell, name, _Pass())
    return _with_logits(shell, is_first=stage == 0) if hasattr(shell, "pp_plan") else shell


def _set(shell: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    shell.get_submodule(parent)._modules[last] = module


def _shallow_copy(module: nn.Module) -> nn.Module:
    """The module with the same parameters in new shells, so that children can be replaced."""
    parameters = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo=dict(parameters))
