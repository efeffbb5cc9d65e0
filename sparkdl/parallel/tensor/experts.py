"""Mixtures of experts under tensor parallelism: each rank has some whole experts; outputs are summed over the ranks.

The experts of a layer are one module with weights of shape ``(experts, ...)``, as in models of Hugging Face. It takes
the hidden states of tokens, the indices of each token's experts, and the weights of these experts. Every rank computes
its own experts for all tokens. The result is the same as with ``moe_tp_experts`` in transformers, which divides the
features of each expert.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.parallel.collectives import (
    apply,
    gather,
    gather_and_reduce_gradient,
    reduce_scatter,
    sum_gradient,
    sum_of_ranks,
)
from sparkdl.parallel.tensor.layers import whole_parameters
from sparkdl.torch.buffers import local_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.parallel.tensor.layers import Division

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_TOKENS = 0
"""The dimension of tokens in the arguments."""


def check_experts(name: str, layer: nn.Module, size: int) -> None:
    """Check that a module is a mixture of experts that ranks can divide.

    Args:
        name: name of the module, used in error messages.
        layer: the module.
        size: number of tensor-parallel ranks.

    Raises:
        ParamError: if the module is of another kind, or ``size`` does not divide its number of experts.
    """
    count = getattr(layer, "num_experts", None)
    weights = list(layer.parameters(recurse=False))
    if (
        not isinstance(count, int)
        or [*inspect.signature(layer.forward).parameters] != _ARGUMENTS
        or len(weights) != len(list(layer.parameters()))
        or any(weight.ndim == 0 or weight.shape[0] != count for weight in weights)
    ):
        raise ParamError(
            f"The plan divides {name!r} in the style 'experts', which takes a module with num_experts, weights of "
            f"shape (num_experts, ...) and forward({', '.join(_ARGUMENTS)}); {type(layer).__name__} is none. Leave "
            "it out of the plan, or use shard= in place of tensor=."
        )
    check_divisible(f"{name!r} has {count} experts", count, size)


def check_divisible(what: str, count: int, size: int) -> None:
    """Check that tensor-parallel ranks can divide a number of equal parts; ``what`` names it in a sentence.

    Raises:
        ParamError: if they cannot.
    """
    if count % size:
        raise ParamError(
            f"{what}, which {size} tensor-parallel ranks cannot divide. Use a tensor size that divides {count}."
        )


def divide_experts(layer: Any, division: Division, *, in_parts: bool) -> None:
    """Make a mixture of experts compute with this rank's experts, and sum their outputs over the ranks.

    Args:
        layer: the mixture.
        division: division of the model.
        in_parts: whether each rank has different tokens, those of its part of the sequences.
    """
    # A hook would not run when a block is recomputed.
    layer.forward = functools.partial(_forward_of_rank, layer, layer.forward, division, in_parts)
    if hasattr(layer, "_is_expert_parallel"):
        layer._is_expert_parallel = True  # so that transformers skips the experts of other ranks


def _forward_of_rank(
    layer: Any,
    forward: Callable[..., Tensor],
    division: Division,
    in_parts: bool,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    if division.is_whole:
        with whole_parameters(layer):
            return forward(hidden_states, top_k_index, top_k_weights)
    kept, count, group = dict(layer._parameters), layer.num_experts, division.group
    if in_parts:
        hidden_states = gather_and_reduce_gradient(hidden_states, group, _TOKENS)
        top_k_weights = gather_and_reduce_gradient(top_k_weights, group, _TOKENS)
        top_k_index = gather(top_k_index, group, _TOKENS)
    else:
        hidden_states = sum_gradient(hidden_states, group)
        top_k_weights = sum_gradient(top_k_weights, group)
    own_count = count // dist.get_world_size(group)
    numbers = top_k_index - division.rank * own_count
    elsewhere = (numbers < 0) | (numbers >= own_count)
    layer._parameters.update({name: local_part(parameter) for name, parameter in kept.items()})
    layer.num_experts = own_count
    try:
        # The index ``own_count`` stands for the experts of other ranks, as in transformers.
        output = forward(
            hidden_states,
            numbers.masked_fill(elsewhere, own_count),
            top_k_weights.masked_fill(elsewhere, 0.0),
        )
        if torch.is_grad_enabled() and not output.requires_grad:  # no token has an expert here
            output = apply(_WithoutTokens, output, hidden_states, top_k_weights, *layer.parameters())
    finally:
        layer.num_experts = count
        layer._parameters.update(kept)
    if in_parts:
        return reduce_scatter(output, group, _TOKENS)
    return sum_of_ranks(output, group)


class _WithoutTokens(torch.autograd.Function):
    """An output to which no input contributes, with gradients of zero for them.

    The backward pass then calls the same collectives as on other ranks, and all experts have a gradient.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.shapes = [tensor.shape for tensor in inputs]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], *(gradients[0].new_zeros(shape) for shape in ctx.shapes)
