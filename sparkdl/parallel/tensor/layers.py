"""Layers that compute with this rank's part of their parameters, and the collectives that their styles need."""

from __future__ import annotations

import functools
import itertools
import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sparkdl.parallel.collectives import (
    gather,
    reduce_scatter,
    split,
    sum_gradient,
    sum_of_ranks,
)
from sparkdl.torch.buffers import local_part, whole_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence


class Division:
    """What the layers of a divided model share.

    They share copies of inputs, one for all ``colwise`` layers that take the same tensor: its gradient is summed only
    once.

    Args:
        group: process group of the tensor-parallel ranks.

    Attributes:
        group: process group of the tensor-parallel ranks.
        rank: number of this rank in the group.
        is_whole: whether layers compute with whole weights and sequences at the moment, as before the division.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.is_whole = False
        self._last: tuple[weakref.ref[Tensor], Tensor] | None = None

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of an input whose gradient is summed over the ranks."""
        if self._last is not None and self._last[0]() is tensor:
            return self._last[1]
        copied = sum_gradient(tensor, self.group)
        self._last = weakref.ref(tensor), copied
        return copied

    def forget_copy(self, *_: object) -> None:
        """Drop the last copy, whose graph would otherwise stay in memory."""
        self._last = None


class TensorParallelLayer:
    """A layer of a divided model; it computes with this rank's parts of its parameters, and its style's collectives.

    A layer that the plan does not name has the style ``whole``, or ``replicated`` where sequences are divided.

    Args:
        layer: the layer, whose ``forward`` is wrapped: a hook would not run when a block is recomputed.
        style: style of the layer.
        division: division of the model.
        in_parts: whether the layer lies where sequences are divided.
        divided_parameters: names of the parameters that the plan divides by themselves.
        shared: number of the last output features that all heads share, in the style ``mla_kv_a_proj``.
    """

    def __init__(
        self,
        layer: nn.Module,
        style: str,
        division: Division,
        *,
        in_parts: bool,
        divided_parameters: Collection[str],
        shared: int,
    ) -> None:
        self._style = style
        self._division, self._group = division, division.group
        self._in_parts = in_parts
        self._divided_parameters = divided_parameters
        self._shared = shared
        layer.forward = functools.partial(self._forward, layer, layer.forward)

    def _forward(self, layer: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        if self._division.is_whole:
            with whole_parameters(layer):
                return forward(*args, **kwargs)
        kept = dict(layer._parameters)
        parts = self.parts_of(layer)
        bias = outside = None
        if self._style.startswith("rowwise"):
            bias, parts["bias"] = parts.get("bias"), None  # added once, after the sum over ranks
        if self._style not in ("whole", "replicated"):
            first, *others = args or (kwargs.pop(next(iter(kwargs))),)
            if self._style == "embedding_rowwise":
                first, outside = self._own_rows(first, parts["weight"])
            elif self._style == "rowwise_split_input":
                first = split(first, self._group, first.ndim - 1)
            elif self._style.startswith("colwise") and not self._in_parts:
                first = self._division.copy_of(first)
            args = (first, *others)
        layer._parameters.update(parts)  # type: ignore[arg-type]  # for this call
        try:
            with self._own_padding(layer) if outside is not None else nullcontext():
                output = forward(*args, **kwargs)
        finally:
            layer._parameters.update(kept)
        if outside is not None:
            output = output.masked_fill(outside.unsqueeze(-1), 0.0)
        return self._join(output, bias)

    def parts_of(self, layer: nn.Module) -> dict[str, Tensor | None]:
        """This rank's parts of the layer's parameters, with gradients."""
        return {name: self._part_of(name, parameter) for name, parameter in layer._parameters.items()}

    def _join(self, output: Any, bias: Tensor | None) -> Any:
        """Combine this rank's output with those of the other ranks, as the style needs it."""
        if self._style == "embedding_rowwise":
            return sum_of_ranks(output, self._group)
        if self._style == "colwise_gather_output":
            return gather(output, self._group, output.ndim - 1)
        if self._style.startswith("rowwise"):
            if self._in_parts:
                output = reduce_scatter(output, self._group, positions_of(output))
            else:
                output = sum_of_ranks(output, self._group)
            return output if bias is None else output + bias
        if self._shared and not self._in_parts:
            features, key = output.split([output.shape[-1] - self._shared, self._shared], dim=-1)
            return torch.cat([features, sum_gradient(key, self._group)], dim=-1)
        return output

    def _part_of(self, name: str, parameter: nn.Parameter | None) -> Tensor | None:
        local = None if parameter is None else local_part(parameter)
        # With sequence parallelism each rank has a share of these gradients.
        has_shares = self._in_parts and (self._shared > 0 or self._style.startswith("rowwise"))
        is_summed = self._style == "replicated" or has_shares
        if name in self._divided_parameters or not isinstance(parameter, DTensor):
            return local  # a part already: see compute_with_parts
        # Gradients are summed for layers that see other positions or heads on each rank, and for biases added to them.
        if local is None or not is_summed or (self._style.startswith("rowwise") and local.ndim > 1):
            return local
        return sum_gradient(local, self._group)

    def _own_rows(self, tokens: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of the tokens in this rank's part of an embedding, and a mask of the tokens that have no row there."""
        assert weight is not None
        rows = tokens - self._division.rank * weight.shape[0]
        outside = (rows < 0) | (rows >= weight.shape[0])
        return rows.masked_fill(outside, 0), outside

    @contextmanager
    def _own_padding(self, layer: nn.Module) -> Iterator[None]:
        """Context in which ``padding_idx``, whose row gets no gradient, counts in this rank's part of an embedding."""
        assert isinstance(layer, nn.Embedding)
        padding = layer.padding_idx
        if padding is not None:
            row = padding - self._division.rank * layer.weight.shape[0]
            layer.padding_idx = row if 0 <= row < layer.weight.shape[0] else None
        try:
            yield
        finally:
            layer.padding_idx = padding


@contextmanager
def whole_parameters(layer: nn.Module) -> Iterator[None]:
    """Context in which a layer has its whole parameters, as if it were not divided. Collective."""
    kept = dict(layer._parameters)
    undivided = {name: None if part is None else whole_tensor(part) for name, part in kept.items()}
    layer._parameters.update(cast("Any", undivided))
    try:
        yield
    finally:
        layer._parameters.update(kept)


def compute_with_parts(block: nn.Module, undivided: Mapping[nn.Module, TensorParallelLayer]) -> None:
    """Wrap a block's ``forward``, during which the parameters of its undivided layers are plain tensors.

    The forward method of a module may compute with the weights of a layer inside of it and not call the layer, as
    linear attention does with those of its convolution.

    Args:
        block: the block.
        undivided: the layers that are not divided, each with the object that gives its parts.
    """
    layers = [
        (
            layer,
            undivided[layer],
            [block.get_submodule(path) for path in itertools.accumulate(name.split("."), "{}.{}".format)],
        )
        for name, layer in block.named_modules()
        if name and layer in undivided
    ]
    block.forward = functools.partial(_forward_with_parts, layers, block.forward)


def _forward_with_parts(
    layers: Sequence[tuple[nn.Module, TensorParallelLayer, Sequence[nn.Module]]],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    kept = []
    for layer, undivided, around in layers:
        # A part of the block that is sharded by itself gathers its weights when it is called.
        if any(isinstance(outer, FSDPModule) for outer in around):
            continue
        kept.append((layer, dict(layer._parameters)))
        layer._parameters.update(cast("Any", undivided.parts_of(layer)))  # for this call
    try:
        return forward(*args, **kwargs)
    finally:
        for layer, parameters in kept:
            layer._parameters.update(parameters)


def positions_of(activations: Tensor) -> int:
    """The dimension of positions: of ``(batch, positions, features)``, or of ``(tokens, features)`` of some layers."""
    return 1 if activations.ndim > 2 else 0
