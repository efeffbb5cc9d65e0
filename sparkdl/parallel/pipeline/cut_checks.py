"""Checks that a model computes nothing outside of its parts, which each of its stages would compute again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError, SparkdlError
from sparkdl.parallel.pipeline.parts import blocks_in, hugging_face_model
from sparkdl.parallel.pipeline.stand_ins import OwnBlocks, Pass, PassAs, own_blocks, set_module, shallow_copy
from sparkdl.parallel.sharding import OtherBuffers

if TYPE_CHECKING:
    from sparkdl.parallel.pipeline.parts import PipelineParts


@torch.no_grad()
def check_between_parts(module: nn.Module, parts: PipelineParts) -> None:
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


def check_parameters(module: nn.Module, parts: PipelineParts) -> None:
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


class FirstCall:
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
                f"{type(stage).__name__} computes something by the number of a block, which a pipeline stage counts "
                "from 0. Keep what belongs to a block inside of it."
            )
