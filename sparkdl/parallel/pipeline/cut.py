"""Models cut into the stages of a pipeline.

:func:`cut` keeps the part of a model that a rank's stages compute: the model itself, in which modules of other stages
are replaced by modules that return their input. :class:`~sparkdl.parallel.pipeline.pipeline.Pipeline` runs a schedule
over the stages. A model that computes something outside of its parts is refused: each stage would compute it again.
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkdl.errors import ParamError, SparkdlError
from sparkdl.parallel.parallelism import SCHEDULES
from sparkdl.parallel.pipeline.parts import balance, blocks_in, costs_by_memory, hugging_face_model, parts_of
from sparkdl.parallel.pipeline.schedules import ranks_of_stages, stages_of_rank
from sparkdl.parallel.pipeline.stand_ins import (
    OwnBlocks,
    Pass,
    PassAs,
    make_replacement,
    own_blocks,
    set_module,
    shallow_copy,
    untie,
)
from sparkdl.parallel.pipeline.tied import TiedParameter
from sparkdl.parallel.sharding import OtherBuffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.parallel.pipeline.parts import PipelineParts


def cut(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    schedule: str = "1f1b",
    costs: Sequence[float] | None = None,
    stage_blocks: Sequence[int] | None = None,
) -> list[nn.Module]:
    """Keep this rank's stages of a model.

    Args:
        module: the whole model, the same on all ranks or on the meta device. It is taken apart: do not use it again.
        group: process group of the ranks of the pipeline, such as ``layout.group("pipeline")``.
        schedule: name of a schedule in :data:`SCHEDULES`.
        costs: cost of each block, for balanced stages; :func:`costs_by_memory` if None.
        stage_blocks: number of blocks of each stage, in place of balanced stages.

    Returns:
        The stages of this rank in ascending order; each takes the output of the stage before it. Modules keep their
        names, and blocks their numbers, so that checkpoints of all stages together are those of the whole model.

    Raises:
        ParamError: if there are fewer blocks than stages, a parameter of a block would lie on several stages, a
            parameter is outside of the parts, or the model computes something between its parts, which every stage
            would compute again. Stages after the first check the latter at their first call, except for Hugging Face
            models, which are checked here.
    """
    parts = parts_of(module)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    numbers = stages_of_rank(schedule, rank, ranks)
    num_stages = len(ranks_of_stages(schedule, ranks))
    firsts, tied = check_cut(module, parts, schedule, ranks, costs=costs, stage_blocks=stage_blocks)
    # All stages but the last are copies of the shell around the modules that they keep.
    stages = []
    for stage in numbers:
        shell = module if stage == numbers[-1] else shallow_copy(module)
        stages.append(_keep(shell, parts, stage, num_stages, firsts, tied))
        made = cast("Any", stages[-1])
        made.is_pipeline_stage = num_stages > 1  # so that nothing takes it for the whole model
        made.is_last_stage = stage == num_stages - 1
        made.tied_parameters = tied
    for tie in tied:
        sharing = [made for stage, made in zip(numbers, stages, strict=True) if stage in tie.stages]
        for made in sharing[1:]:  # each stage trains a copy of its own
            untie(made, tie)
    return stages


def check_cut(
    module: nn.Module,
    parts: PipelineParts,
    schedule: str,
    ranks: int,
    *,
    costs: Sequence[float] | None = None,
    stage_blocks: Sequence[int] | None = None,
) -> tuple[list[int], list[TiedParameter]]:
    """Check that a model can be cut into the stages of a schedule; needs no process group.

    Args:
        module: the whole model.
        parts: parts of the model.
        schedule: name of a schedule in :data:`SCHEDULES`.
        ranks: number of ranks of the pipeline.
        costs: see :func:`cut`.
        stage_blocks: see :func:`cut`.

    Returns:
        Index of the first block of each stage, followed by the number of blocks; and the parameters that several stages
        have.

    Raises:
        ParamError: see :func:`cut`.
    """
    per_rank = len(stages_of_rank(schedule, 0, ranks))
    num_stages = ranks * per_rank
    blocks = blocks_in(module, parts)
    if len(blocks) < num_stages:
        fewer = len(blocks) // per_rank
        ways = [f"pipeline={fewer} or less"] if fewer else []
        ways += ["a schedule with one stage per rank, such as '1f1b'"] if per_rank > 1 else []
        raise ParamError(
            f"A model with {len(blocks)} blocks cannot be cut into {num_stages} pipeline stages ({ranks} ranks, "
            f"schedule {schedule!r}). Use {' or '.join(ways) or 'a model with more blocks'}."
        )
    _check_parameters(module, parts)
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
    tied = _tied_parameters(module, parts, firsts)
    if SCHEDULES[schedule].splits_backward:
        frozen = sorted(set(range(num_stages)) - _trained_stages(module, parts, firsts))
        if frozen:
            raise ParamError(
                f"No parameter of pipeline stage {frozen[0]} is trained, for which the schedule {schedule!r} computes "
                "wrong gradients. Use a schedule that does not split the backward pass, such as '1f1b'."
            )
    return firsts, tied


def check_trainable(
    module: nn.Module, schedule: str, ranks: int, *, stage_blocks: Sequence[int] | None = None
) -> None:
    """Check that each rank of a pipeline has a parameter to train, as its optimizer needs one.

    Raises:
        ParamError: if a rank has none, or the model cannot be cut.
    """
    parts = parts_of(module)
    firsts, _ = check_cut(module, parts, schedule, ranks, stage_blocks=stage_blocks)
    trained = _trained_stages(module, parts, firsts)
    for rank in range(ranks):
        numbers = stages_of_rank(schedule, rank, ranks)
        if not trained.intersection(numbers):
            blocks = ", ".join(f"{firsts[stage]} to {firsts[stage + 1] - 1}" for stage in numbers)
            raise ParamError(
                f"Rank {rank} of the pipeline would have the blocks {blocks}, and none of their parameters is trained. "
                "Use fewer pipeline ranks, or join such layers with others into one block."
            )


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


def _trained_stages(module: nn.Module, parts: PipelineParts, firsts: Sequence[int]) -> set[int]:
    return {
        _stage_of(name, parts, firsts)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def _stage_of(name: str, parts: PipelineParts, firsts: Sequence[int]) -> int:
    prefix = f"{parts.blocks}." if parts.blocks else ""
    if name.startswith(prefix):
        number = name.removeprefix(prefix).partition(".")[0]
        if number.isdigit():
            return max(stage for stage, first in enumerate(firsts[:-1]) if first <= int(number))
    if any(name == part or name.startswith(f"{part}.") for part in parts.after):
        return len(firsts) - 2
    return 0


def _keep(
    shell: nn.Module,
    parts: PipelineParts,
    stage: int,
    num_stages: int,
    firsts: Sequence[int],
    tied: Sequence[TiedParameter],
) -> nn.Module:
    layers = slice(firsts[stage], firsts[stage + 1])
    blocks = blocks_in(shell, parts)
    kept = own_blocks(blocks, {str(number): blocks[number] for number in range(layers.start, layers.stop)})
    if not parts.blocks:
        return kept
    set_module(shell, parts.blocks, kept)
    is_first, is_last = stage == 0, stage == num_stages - 1
    own_ties = [tie for tie in tied if stage in tie.stages]
    for names, is_kept in ((parts.before, is_first), (parts.after, is_last)):
        for name in names:
            if not is_kept:
                set_module(shell, name, make_replacement(shell, name, own_ties))
    located = hugging_face_model(shell)
    if located is not None:
        prefix, model = located
        base = shell.get_submodule(parts.blocks.rpartition(".")[0])
        _make_stage(model, base, is_root=not prefix, is_first=is_first, is_last=is_last, layers=layers)
    elif not is_first:
        _FirstCall(shell, parts, layers.start)
    return shell


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
    # The loop over blocks looks up each block's kind of attention in these lists, by the block's position.
    count, config = base.config.num_hidden_layers, copy.copy(base.config)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == count:
            config.__dict__[key] = value[layers]
    base.config = config
    name, forward, called = "input_ids" if is_first else "inputs_embeds", model.forward, base.forward

    def pass_on(tensor: Tensor, **kwargs: Any) -> Tensor:
        keywords = {key: value for key, value in kwargs.items() if value is not None}
        keywords |= {name: tensor, "use_cache": False}
        # Only the last stage computes logits.
        hidden: Tensor = forward(**keywords).logits if is_last else called(**keywords).last_hidden_state
        return hidden

    def answer(input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=pass_on(input_ids, **kwargs))

    model.forward = pass_on if is_root else answer


@torch.no_grad()
def _check_between_parts(module: nn.Module, parts: PipelineParts) -> None:
    """Refuse a Hugging Face model that computes something between its parts, as every stage would compute it again.

    Raises:
        ParamError: if the model does.
    """
    model = hugging_face_model(module)
    if model is None:
        return
    base: Any = shallow_copy(module.get_submodule(parts.blocks.rpartition(".")[0]))
    prefix = parts.blocks.removesuffix(parts.blocks.rpartition(".")[2])
    for name in (*parts.before, *parts.after):
        if name.startswith(prefix):
            set_module(base, name.removeprefix(prefix), Pass())
    set_module(base, parts.blocks.removeprefix(prefix), OwnBlocks())
    if any(buffer.is_meta for buffer in base.buffers()):
        return  # draw_weights and load_weights refuse such a model
    device = next((buffer.device for buffer in base.buffers()), None)
    width = base.config.get_text_config().hidden_size
    hidden = torch.linspace(-1.0, 1.0, 2 * width, device=device).view(1, 2, -1)
    if not torch.equal(base(inputs_embeds=hidden, use_cache=False).last_hidden_state, hidden):
        raise ParamError(
            f"{type(model[1]).__name__} computes something between its embedding and its layers, or after them, that "
            "is not a module of its plan, so that every pipeline stage would do it again. Use shard or tensor for it."
        )


def _check_parameters(module: nn.Module, parts: PipelineParts) -> None:
    """Check that all parameters of a model belong to its parts.

    Each stage would have its own copy of another parameter, and use it again.

    Raises:
        ParamError: if one does not.
    """
    inside = tuple(f"{name}." for name in (*parts.before, *parts.after, parts.blocks) if name)
    for name, _ in module.named_parameters(remove_duplicate=False):
        if parts.blocks and not f"{name}.".startswith(inside):
            raise ParamError(
                f"The parameter {name!r} of {type(module).__name__} is in none of its pipeline parts, so that every "
                "stage would have it. Put it into a module that is named before or after the blocks."
            )


class _FirstCall:
    """Hook that checks a stage after the first one at its first call.

    A model whose ``forward`` changes the tensor between its parts would do so in every stage, and a model that looks up
    something by a block's number would find that of another block, as a stage counts its blocks from 0. Both would be
    wrong silently. A model whose ``forward`` needs all of its blocks cannot be checked in this way.

    Args:
        stage: the stage.
        parts: parts of the model.
        number_of_first: number of the stage's first block in the model.
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
        others = {name: value for name, value in kwargs.items() if args or value is not hidden}
        of_stage = blocks_in(stage, self._parts)
        ends = [name for name in self._parts.after if not hasattr(stage.get_submodule(name), "is_elsewhere")]
        kept = {name: stage.get_submodule(name) for name in ends}

        buffers = OtherBuffers(stage)  # each call begins with the same ones
        returned: list[Any] = []
        first_own: nn.Module = next(iter(of_stage.children()))
        noted = first_own.register_forward_hook(lambda *call: returned.append(call[-1]))

        def output_with(blocks: nn.Module) -> Tensor | None:
            set_module(stage, self._parts.blocks, blocks)
            devices = [hidden.device] if hidden.is_cuda else []
            try:
                with buffers, torch.no_grad(), torch.random.fork_rng(devices):
                    output = stage.forward(tried, *args[1:], **others)
            except SparkdlError:  # a lost rank, for example
                raise
            except Exception:  # a forward that does not work with such blocks
                return None
            return output if isinstance(output, Tensor) else None

        try:
            for name in ends:
                set_module(stage, name, Pass())
            nothing = output_with(own_blocks(of_stage, {}))
            counted = output_with(of_stage)
            others_before = {str(n): PassAs(returned[:1]) for n in range(self._number_of_first)}
            numbered = output_with(own_blocks(of_stage, others_before | dict(of_stage.named_children())))
        finally:
            noted.remove()
            set_module(stage, self._parts.blocks, of_stage)
            for name, value in kept.items():
                set_module(stage, name, value)
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
                f"{type(stage).__name__} computes something by the number of a block, and a pipeline stage counts its "
                "blocks from 0. Keep what belongs to a block inside of it."
            )
