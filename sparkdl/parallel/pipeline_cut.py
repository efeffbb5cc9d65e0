"""Models cut into the stages of a pipeline.

:func:`cut` keeps the part of a model that a rank's stages compute: the model itself, in which modules of other stages
are replaced by modules that return their input. :class:`sparkdl.parallel.pipeline.Pipeline` runs a schedule over the
stages.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.parallel.pipeline import SCHEDULES, TiedParameter, stages_of_rank

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PipelineParts:
    """The parts of a model in the order in which they compute.

    Attributes:
        before: names of the modules before the blocks; later stages replace them by modules that return their input.
        blocks: name of the list of blocks: a ``ModuleList``, or a ``Sequential`` that is the model itself (``""``).
            ``pipeline_parts`` may also name a module that has parts of its own.
        after: names of the modules after the blocks; earlier stages replace them in the same way.
    """

    before: tuple[str, ...]
    blocks: str
    after: tuple[str, ...]


def parts_of(module: nn.Module) -> PipelineParts:
    """The parts of a model, from its ``pipeline_parts``, the plan of a Hugging Face model, or a ``Sequential``.

    Raises:
        ParamError: if the model has none of these.
    """
    given = getattr(module, "pipeline_parts", None)
    if given is not None:
        before, blocks, after = given
        inner = module.get_submodule(blocks)
        if not isinstance(inner, nn.ModuleList | nn.Sequential):
            own = parts_of(inner)
            before = (*before, *(f"{blocks}.{name}" for name in own.before))
            after = (*(f"{blocks}.{name}" for name in own.after), *after)
            blocks = f"{blocks}.{own.blocks}"
        return PipelineParts(tuple(before), blocks, tuple(after))
    if type(module) is nn.Sequential:
        return PipelineParts((), "", ())
    found = _of_hugging_face(module)
    if found is not None:
        outside, model = found
        plan = [f"{outside}{name}" for name in model.pp_plan or ()]
        lists = [name for name in plan if isinstance(module.get_submodule(name), nn.ModuleList)]
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

    Args:
        costs: cost of each block; the costs of modules before and after the blocks are added to the first and the last.
        stages: number of stages; each gets at least one block.

    Returns:
        Index of the first block of each stage, followed by the number of blocks.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][n]: the cost of the costliest of k stages over the first n blocks, and the first block of the last stage.
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


def costs_by_memory(module: nn.Module, parts: PipelineParts | None = None) -> list[float]:
    """Number of weights of each block; those before and after the blocks count with the first and the last block."""
    parts = parts or parts_of(module)
    costs = [_weights(block) for block in _blocks(module, parts)]
    costs[0] += sum(_weights(module.get_submodule(name)) for name in parts.before)
    costs[-1] += sum(_weights(module.get_submodule(name)) for name in parts.after)
    return costs


def costs_by_time(
    module: nn.Module,
    *args: Any,
    group: dist.ProcessGroup,
    parts: PipelineParts | None = None,
    repeats: int = 3,
    **kwargs: Any,
) -> list[float]:
    """Seconds of each block's forward pass on a small batch, measured on the group's first rank. Collective.

    Args:
        module: the whole model, not on the meta device.
        args: positional arguments with which the model is called.
        group: process group of the ranks that cut the model; all get the same costs.
        parts: parts of the model; :func:`parts_of` if None.
        repeats: number of calls; the fastest time of each block counts.
        kwargs: keyword arguments with which the model is called.
    """
    parts = parts or parts_of(module)
    blocks = list(_blocks(module, parts))
    measured: list[list[float]] = [[0.0] * len(blocks)]
    if dist.get_rank(group) == 0:
        watch = _Stopwatch()
        watched = [*(module.get_submodule(name) for name in parts.before), *blocks]
        watched += [module.get_submodule(name) for name in parts.after]
        handles = []
        for number, layer in enumerate(watched):
            handles.append(layer.register_forward_pre_hook(watch.begin))
            handles.append(layer.register_forward_hook(functools.partial(watch.end, number)))
        runs = []
        for _ in range(repeats):
            watch.seconds = [0.0] * len(watched)
            with torch.no_grad():
                module(*args, **kwargs)
            runs.append(watch.seconds)
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


class _Stopwatch:
    """Times layers from their forward hooks.

    Attributes:
        seconds: time spent in each layer, over all of its calls.
    """

    seconds: list[float]

    def begin(self, *_: object) -> None:
        """Note that a layer begins."""
        self._began = self._now()

    def end(self, number: int, *_: object) -> None:
        """Note that the layer with this number has ended."""
        self.seconds[number] += self._now() - self._began

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a call only starts the GPU's work
        return time.perf_counter()


def cut(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    schedule: str = "1f1b",
    costs: Sequence[float] | None = None,
    stage_blocks: Sequence[int] | None = None,
    parts: PipelineParts | None = None,
) -> list[nn.Module]:
    """Keep this rank's stages of a model.

    Args:
        module: the whole model, the same on all ranks or on the meta device. It is taken apart: do not use it again.
        group: process group of the ranks of the pipeline, such as ``layout.group("pipeline")``.
        schedule: name of a schedule in :data:`SCHEDULES`.
        costs: cost of each block, by which the stages are balanced; :func:`costs_by_memory` if None.
        stage_blocks: number of blocks of each stage, in place of balanced stages.
        parts: parts of the model; :func:`parts_of` if None.

    Returns:
        The stages of this rank in ascending order; each takes the output of the stage before it. Modules keep their
        names, and blocks their numbers, so that checkpoints of all stages together are those of the whole model.

    Raises:
        ParamError: if there are fewer blocks than stages, a parameter of a block would lie on several stages, or the
            model computes something between its parts, which every stage would compute again. Stages after the first
            check the latter at their first call, except for Hugging Face models, which are checked here.
    """
    parts = parts or parts_of(module)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = stages_of_rank(schedule, rank, ranks)
    num_stages = ranks * SCHEDULES[schedule].stages_per_rank
    firsts = check_cut(module, schedule, ranks, costs=costs, stage_blocks=stage_blocks, parts=parts)
    tied = _tied_parameters(module, parts, firsts)
    # All stages but the last are copies of the shell around the modules that they keep.
    stages = []
    for stage in own:
        shell = module if stage == own[-1] else _shallow_copy(module)
        stages.append(_keep(shell, parts, stage, num_stages, firsts, tied))
        made = cast("Any", stages[-1])
        made.is_pipeline_stage = num_stages > 1  # so that nothing takes it for the whole model
        made.tied_parameters = tied
    for tie in tied:
        sharing = [made for stage, made in zip(own, stages, strict=True) if stage in tie.stages]
        for made in sharing[1:]:  # each stage trains a copy of its own
            _untie(made, tie)
    return stages


def check_cut(
    module: nn.Module,
    schedule: str,
    ranks: int,
    *,
    costs: Sequence[float] | None = None,
    stage_blocks: Sequence[int] | None = None,
    parts: PipelineParts | None = None,
) -> list[int]:
    """Check that a model can be cut into the stages of a schedule; needs no process group.

    Args:
        module: the whole model.
        schedule: name of a schedule in :data:`SCHEDULES`.
        ranks: number of ranks of the pipeline.
        costs: see :func:`cut`.
        stage_blocks: see :func:`cut`.
        parts: parts of the model; :func:`parts_of` if None.

    Returns:
        Index of the first block of each stage, followed by the number of blocks.

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
    _check_between_parts(module, parts)
    if stage_blocks is not None:
        if len(stage_blocks) != num_stages or sum(stage_blocks) != len(blocks) or min(stage_blocks) < 1:
            raise ParamError(
                f"stage_blocks is {list(stage_blocks)}, and {len(blocks)} blocks are to be cut into {num_stages} "
                f"pipeline stages. Give {num_stages} positive numbers whose sum is {len(blocks)}."
            )
        firsts = [0, *itertools.accumulate(stage_blocks)]
    else:
        costs = costs_by_memory(module, parts) if costs is None else costs
        if len(costs) != len(blocks):
            raise ParamError(
                f"There are {len(costs)} costs for {len(blocks)} blocks; give one for each block."
            )
        firsts = balance(costs, num_stages)
    _tied_parameters(module, parts, firsts)
    return firsts


def check_trainable(
    module: nn.Module, schedule: str, ranks: int, *, stage_blocks: Sequence[int] | None = None
) -> None:
    """Check that each rank of a pipeline has a parameter to train, as its optimizer needs one.

    Raises:
        ParamError: if a rank has none, or the model cannot be cut.
    """
    parts = parts_of(module)
    firsts = check_cut(module, schedule, ranks, stage_blocks=stage_blocks, parts=parts)
    trained = {
        _stage_of(name, parts, firsts) for name, each in module.named_parameters() if each.requires_grad
    }
    for rank in range(ranks):
        own = stages_of_rank(schedule, rank, ranks)
        if not trained.intersection(own):
            blocks = ", ".join(f"{firsts[stage]} to {firsts[stage + 1] - 1}" for stage in own)
            raise ParamError(
                f"Rank {rank} of the pipeline would have the blocks {blocks}, of which no parameter is trained. Use "
                "fewer pipeline ranks, or join such layers with others into one block."
            )


def _blocks(module: nn.Module, parts: PipelineParts) -> nn.ModuleList | nn.Sequential:
    blocks = module.get_submodule(parts.blocks)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise ParamError(
            f"The blocks {parts.blocks!r} of {type(module).__name__} must be a torch.nn.ModuleList or Sequential, they "
            f"are a {type(blocks).__name__}."
        )
    return blocks


def _weights(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))


def _tied_parameters(module: nn.Module, parts: PipelineParts, firsts: Sequence[int]) -> list[TiedParameter]:
    """The parameters that several stages have.

    Raises:
        ParamError: if one of them belongs to a block by its first name.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tied = []
    for several in names.values():
        stages = tuple(sorted({_stage_of(name, parts, firsts) for name in several}))
        if len(stages) == 1:
            continue
        outside = (*parts.before, *parts.after)
        if not any(several[0] == part or several[0].startswith(f"{part}.") for part in outside):
            raise ParamError(
                f"{' and '.join(map(repr, several))} are one parameter, and lie on the pipeline stages "
                f"{', '.join(map(str, stages))}. Give each block weights of its own; only modules before and after the "
                "blocks, such as embedding and head, may share theirs."
            )
        tied.append(TiedParameter(several[0], tuple(several), stages))
    return tied


def _stage_of(name: str, parts: PipelineParts, firsts: Sequence[int]) -> int:
    prefix = f"{parts.blocks}." if parts.blocks else ""
    if name.startswith(prefix):
        number = name.removeprefix(prefix).partition(".")[0]
        if number.isdigit():
            return max(stage for stage, first in enumerate(firsts[:-1]) if first <= int(number))
    if any(name == part or name.startswith(f"{part}.") for part in parts.after):
        return len(firsts) - 2
    return 0


def _first_argument(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


class _Pass(nn.Module):
    """Replaces a module of another stage: returns its first argument."""

    is_elsewhere = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return _first_argument(*args, **kwargs)


def _replaced(shell: nn.Module, name: str, tied: Sequence[TiedParameter]) -> nn.Module:
    """Returns its first argument in place of a module of another stage, of which it has the tied parameters alone.

    These then have their first name in every stage, as in the whole model.
    """
    kept = {tie.name for tie in tied if tie.name == name or tie.name.startswith(f"{name}.")}
    if not kept:
        return _Pass()
    replaced: Any = _shallow_copy(shell.get_submodule(name))
    for inner_name, inner in list(replaced.named_modules(prefix=name)):
        for last in inner._parameters:
            if f"{inner_name}.{last}" not in kept:
                inner._parameters[last] = None
        inner._buffers.clear()
        for child in list(inner._modules):
            if not any(each.startswith(f"{inner_name}.{child}.") for each in kept):
                del inner._modules[child]
        inner.is_elsewhere = True
    replaced.forward = _first_argument
    return replaced  # type: ignore[no-any-return]  # a module


def _untie(stage: nn.Module, tie: TiedParameter) -> None:
    """Give a stage a copy of a parameter that another stage of the same rank has, too."""
    shared = stage.get_parameter(tie.name)
    own = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    for name in tie.names:
        parent, _, last = name.rpartition(".")
        holder = dict(stage.named_modules()).get(parent)
        if holder is not None and holder._parameters.get(last) is shared:
            holder._parameters[last] = own


class _PassAs(_Pass):
    """Replaces a block; returns its first argument in the form of another block's output.

    That is a tensor, or a tuple or list that begins with one.
    """

    def __init__(self, returned: list[Any]) -> None:
        super().__init__()
        self._returned = returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument in the form of the other block's output."""
        hidden = super().forward(*args, **kwargs)
        (output,) = self._returned
        if isinstance(output, tuple | list):
            return type(output)((hidden, *output[1:]))
        return hidden


class _OwnBlocks(nn.ModuleList):
    """Some of a list's blocks under their numbers in the list; iterates over them, and its length is their number."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(blocks)

    def __getitem__(self, index: Any) -> Any:
        own = list(self._modules.values())
        return own[index]

    def __iter__(self) -> Any:
        return iter(list(self._modules.values()))


class _OwnLayers(nn.Sequential):
    """Some of a Sequential's layers under their numbers in the Sequential."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)


def _of_hugging_face(module: nn.Module) -> tuple[str, Any] | None:
    """The Hugging Face model that a module is or contains, after the prefix of its names; None if there is none."""
    for name, each in module.named_modules():
        if hasattr(type(each), "pp_plan"):  # adapters of peft have it by proxy
            return f"{name}." if name else "", each
    return None


def _make_stage(
    model: Any, base: Any, *, is_root: bool, is_first: bool, is_last: bool, layers: slice
) -> None:
    """Make a Hugging Face model take and return the tensors that pass between stages.

    Args:
        model: model in which the parts of other stages were replaced.
        base: module of the model that holds the blocks.
        is_root: whether the model is the stage itself, which takes and returns tensors, not part of another module.
        is_first: whether it is the first stage, which takes tokens.
        is_last: whether it is the last stage, which returns logits.
        layers: range of the numbers of its blocks.
    """
    # By a block's number the loop over blocks looks up in these lists which kind of attention the block has.
    count, config = base.config.num_hidden_layers, copy.copy(base.config)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == count:
            config.__dict__[key] = value[layers]
    base.config = config
    name, forward, called = "input_ids" if is_first else "inputs_embeds", model.forward, base.forward

    def pass_on(tensor: Tensor, **kwargs: Any) -> Tensor:
        given = {key: value for key, value in kwargs.items() if value is not None}
        given |= {name: tensor, "use_cache": False}
        # Whatever a model computes from its logits is left to the last stage.
        found: Tensor = forward(**given).logits if is_last else called(**given).last_hidden_state
        return found

    def answer(input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=pass_on(input_ids, **kwargs))

    model.forward = pass_on if is_root else answer


@torch.no_grad()
def _check_between_parts(module: nn.Module, parts: PipelineParts) -> None:
    """Refuse a Hugging Face model that computes something between its parts, as every stage would compute it again.

    Raises:
        ParamError: if the model does.
    """
    found = _of_hugging_face(module)
    if found is None:
        return
    base: Any = _shallow_copy(module.get_submodule(parts.blocks.rpartition(".")[0]))
    prefix = parts.blocks.removesuffix(parts.blocks.rpartition(".")[2])
    for name in (*parts.before, *parts.after):
        if name.startswith(prefix):
            _set(base, name.removeprefix(prefix), _Pass())
    _set(base, parts.blocks.removeprefix(prefix), _OwnBlocks({}))
    if any(buffer.is_meta for buffer in base.buffers()):
        return  # draw_weights and load_weights refuse such a model
    hidden = torch.linspace(-1.0, 1.0, 2 * base.config.get_text_config().hidden_size).view(1, 2, -1)
    if not torch.equal(base(inputs_embeds=hidden, use_cache=False).last_hidden_state, hidden):
        raise ParamError(
            f"{type(found[1]).__name__} computes something between its embedding and its layers, or after them, that "
            "is no module of its plan, so that every pipeline stage would do it again. Use shard or tensor for it."
        )


class _FirstCall:
    """Checks a stage after the first one when it is called for the first time.

    A model whose ``forward`` changes the tensor between its parts would do so in every stage, and a model that looks up
    something by a block's number would find that of another block, as a stage counts its blocks from 0. Both would be
    wrong silently. A model whose ``forward`` needs all of its blocks cannot be checked in this way.
    """

    def __init__(self, stage: nn.Module, parts: PipelineParts, number_of_first: int) -> None:
        self._stage, self._parts, self._number_of_first = stage, parts, number_of_first
        self._handle = stage.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else next(iter(kwargs.values()))
        if hidden.is_meta or not hidden.is_floating_point():
            return
        self._handle.remove()
        generator = torch.Generator(hidden.device).manual_seed(0)
        tried = torch.rand(hidden.shape, generator=generator, dtype=hidden.dtype, device=hidden.device)
        others = {name: each for name, each in kwargs.items() if args or each is not hidden}
        own = _blocks(stage, self._parts)
        ends = [name for name in self._parts.after if not hasattr(stage.get_submodule(name), "is_elsewhere")]
        kept = {name: stage.get_submodule(name) for name in ends}

        buffers = [(each, each.clone()) for each in stage.buffers()]
        returned: list[Any] = []
        first_own: nn.Module = next(iter(own.children()))
        noted = first_own.register_forward_hook(lambda *call: returned.append(call[-1]))

        def output_with(blocks: nn.Module) -> Tensor | None:
            _set(stage, self._parts.blocks, blocks)
            devices = [hidden.device] if hidden.is_cuda else []
            try:
                with torch.no_grad(), torch.random.fork_rng(devices):
                    found = stage.forward(tried, *args[1:], **others)
            except Exception:  # a forward that does not work with such blocks
                return None
            return found if isinstance(found, Tensor) else None

        try:
            for name in ends:
                _set(stage, name, _Pass())
            nothing = output_with(_OwnBlocks({}))
            counted = output_with(own)
            others_before = {str(n): _PassAs(returned[:1]) for n in range(self._number_of_first)}
            numbered = output_with(_OwnBlocks(others_before | own._modules))
        finally:
            noted.remove()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            _set(stage, self._parts.blocks, own)
            for name, each in kept.items():
                _set(stage, name, each)
        if nothing is not None and not torch.equal(nothing, tried):
            raise ParamError(
                f"{type(stage).__name__} computes something before, between or after its pipeline_parts, which every "
                "stage would do again. Make it a module, and name it among the modules before or after the blocks."
            )
        if (
            counted is not None
            and numbered is not None
            and not torch.allclose(counted, numbered, equal_nan=True)
        ):
            raise ParamError(
                f"{type(stage).__name__} computes something by the number of a block, which a pipeline stage counts "
                "from 0. Keep what belongs to a block inside of it."
            )


def _keep(
    shell: nn.Module,
    parts: PipelineParts,
    stage: int,
    num_stages: int,
    firsts: Sequence[int],
    tied: Sequence[TiedParameter],
) -> nn.Module:
    layers = slice(firsts[stage], firsts[stage + 1])
    kept = {str(number): _blocks(shell, parts)[number] for number in range(layers.start, layers.stop)}
    if not parts.blocks:
        return _OwnLayers(kept)
    _set(shell, parts.blocks, _OwnBlocks(kept))
    is_first, is_last = stage == 0, stage == num_stages - 1
    own_ties = [tie for tie in tied if stage in tie.stages]
    for names, is_kept in ((parts.before, is_first), (parts.after, is_last)):
        for name in names:
            if not is_kept:
                _set(shell, name, _replaced(shell, name, own_ties))
    found = _of_hugging_face(shell)
    if found is not None:
        prefix, model = found
        base = shell.get_submodule(parts.blocks.rpartition(".")[0])
        _make_stage(model, base, is_root=not prefix, is_first=is_first, is_last=is_last, layers=layers)
    elif not is_first:
        _FirstCall(shell, parts, layers.start)
    return shell


def _set(shell: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    shell.get_submodule(parent)._modules[last] = module


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its parameters and buffers, so that children can be replaced."""
    parameters = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo=dict(parameters))
