"""Shapes of modules: the sizes of decoders, and counted parameters, operations and activations of other modules.

Operations are counted by torch's ``FlopCounterMode`` on the meta device, where nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from sparkdl.errors import ParamError
from sparkdl.model.architecture import copy_on_meta
from sparkdl.parallel import blocks_of
from sparkdl.planner.shape import DecoderShape, ModelShape, RankNumbers, TrainingRecipe, shape_of_config

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdl.parallel import Parallelism

_DEPTH = 2048.0
"""Depth of the one matrix product that stands for all operations of a counted block."""


def shape_of_module(module: nn.Module, *, sequence: int | None = None) -> DecoderShape:
    """Return the shape of a decoder: one of sparkdl, or a causal language model of transformers.

    Args:
        module: the module; it may be on the meta device.
        sequence: number of positions of a row; the maximum of the model if None.

    Raises:
        ParamError: if it is another module, or ``sequence`` is missing.
    """
    module = getattr(module, "decoder", module)  # of a network that only changes the form of the outputs
    sizes: Any = getattr(module, "sizes", None)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        return shape_of_config(config.to_dict(), name=type(module).__name__, sequence=sequence)
    if not hasattr(sizes, "hidden_features"):
        raise ParamError(
            f"{type(module).__name__} is not a decoder whose sizes the planner can read. Give "
            "sparkdl.planner.count(module, inputs)."
        )
    if sequence is None:
        raise ParamError(
            f"{type(module).__name__} takes rows of any length; give sequence, such as sequence=2048."
        )
    return DecoderShape(
        vocabulary=sizes.vocabulary,
        width=sizes.width,
        layers=sizes.layers,
        heads=sizes.heads,
        key_heads=sizes.key_heads,
        hidden=sizes.hidden_features,
        is_tied=sizes.is_tied,
        sequence=sequence,
        name=type(module).__name__,
    )


@dataclass(frozen=True, kw_only=True)
class CountedShape(ModelShape):
    """The numbers of a module that were counted; blocks count with their average.

    It can be sharded and replicated. A plan does not divide its layers, its sequences or its blocks among stages.

    Attributes:
        name: name of the model in tables.
        layers: number of blocks.
        block: number of parameters of a block, on average.
        outside: number of parameters outside of blocks.
        block_flops: operations of a block's forward pass of a row.
        outside_flops: operations outside of blocks.
        block_bytes: bytes that a block keeps of a row for the backward pass, in the dtype of the weights.
        outside_bytes: bytes kept outside of blocks.
        input_bytes: bytes of the input of a block of a row.
    """

    name: str
    layers: int
    block: int
    outside: int
    block_flops: float
    outside_flops: float
    block_bytes: float
    outside_bytes: float
    input_bytes: float
    sequence: int = 1

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole module."""
        return self.layers * self.block + self.outside

    def on_rank(self, sizes: Parallelism, recipe: TrainingRecipe, *, is_fused: bool = True) -> RankNumbers:
        """Return the figures of one rank. All operations of a block are treated as one matrix product."""
        del sizes, is_fused  # a module that is only sharded computes the same on every rank
        smaller = recipe.compute_bytes / recipe.weight_bytes
        return RankNumbers(
            block=self.block,
            before=0,
            after=self.outside,
            saved=self.block_bytes * smaller,
            inputs=self.input_bytes * smaller,
            outside_saved=self.outside_bytes * smaller,
            positions=1.0,
            products=((self.block_flops / 2 / _DEPTH, _DEPTH),),
            outside_products=((self.outside_flops / 2 / _DEPTH, _DEPTH),),
            moved=self.block_bytes * smaller,
            outside_moved=self.outside_bytes * smaller,
        )

    def flops_per_row(self) -> float:
        """Three times the operations of a forward pass."""
        return 3 * (self.layers * self.block_flops + self.outside_flops)

    def why_not(self, sizes: Parallelism) -> str | None:
        """Why the sizes do not suit a counted module; None if they do."""
        if sizes.tensor * sizes.context * sizes.pipeline > 1:
            return "only decoders are planned with tensor, context and pipeline"
        return None


def count(
    module: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor, *, name: str | None = None
) -> CountedShape:
    """Count the parameters, operations and activations of a module by its blocks; nothing is computed.

    Args:
        module: any module; see :func:`sparkdl.parallel.blocks_of` for what its blocks are. It is not changed.
        inputs: arguments of its ``forward``, by position or by name, tensors of the same number of rows.
        name: name of the model in tables; that of its class if None.

    Raises:
        ParamError: if ``forward`` cannot be called with these inputs on the meta device.
    """
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    positional = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ParamError(
            f"{type(module).__name__} has no parameters that are trained: there is nothing to plan."
        )
    tensors = [value for value in (*positional, *named.values()) if isinstance(value, torch.Tensor)]
    if not tensors or not len(tensors[0]):
        raise ParamError("count() needs inputs with at least one row, from which it counts what a row takes.")
    rows = len(tensors[0])
    on_meta = copy_on_meta(module)
    positional, named = tree_map_only(torch.Tensor, lambda value: value.to("meta"), (positional, named))
    blocks = blocks_of(on_meta) or [on_meta]
    notes = _Notes(on_meta)
    for block in blocks:
        block.register_forward_pre_hook(notes.begin)
        block.register_forward_hook(notes.end)
    flops = FlopCounterMode(display=False)
    try:
        with flops, torch.autograd.graph.saved_tensors_hooks(notes.keep, lambda tensor: tensor):
            notes.read = flops.get_total_flops
            on_meta(*positional, **named)
    except Exception as error:
        raise ParamError(
            f"{type(module).__name__} cannot be called on the meta device: {type(error).__name__}: {error}. Give the "
            "sizes of a decoder, or inputs that its forward takes."
        ) from error
    if not notes.inside + notes.outside:
        raise ParamError(
            f"{type(module).__name__} keeps nothing of its inputs for a backward pass: any batch fits, and there is "
            "nothing to plan."
        )
    of_blocks = sum(parameter.numel() for parameter in {p for block in blocks for p in block.parameters()})
    num_parameters = sum(parameter.numel() for parameter in on_meta.parameters())
    total = flops.get_total_flops()
    calls = len(blocks)
    return CountedShape(
        name=name or type(module).__name__,
        layers=calls,
        block=of_blocks // calls,
        outside=num_parameters - of_blocks // calls * calls,
        block_flops=notes.flops / calls / rows,
        outside_flops=(total - notes.flops) / rows,
        block_bytes=notes.inside / calls / rows,
        outside_bytes=notes.outside / rows,
        input_bytes=notes.inputs / calls / rows,
    )


class _Notes:
    """What hooks note during a forward pass, inside and outside of blocks.

    Attributes:
        read: function that returns the number of operations so far.
        flops: operations inside of blocks.
        inside: bytes that were kept for the backward pass inside of blocks.
        outside: the same, outside of them.
        inputs: bytes of the inputs of blocks.
    """

    read: Callable[[], float]

    def __init__(self, module: nn.Module) -> None:
        self.flops = self.inside = self.outside = self.inputs = 0.0
        self._seen = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self._kept: list[Tensor] = []  # a storage that is freed gives its number to another one
        self._began: float | None = None

    def begin(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note that a block begins."""
        self._began = self.read()
        self.inputs += sum(tensor.nbytes for tensor in inputs if isinstance(tensor, torch.Tensor))

    def end(self, *_: object) -> None:
        """Note that a block has ended."""
        assert self._began is not None, "after begin"
        self.flops += self.read() - self._began
        self._began = None

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is kept for the backward pass."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(tensor)
            if self._began is None:
                self.outside += storage.nbytes()
            else:
                self.inside += storage.nbytes()
        return tensor
