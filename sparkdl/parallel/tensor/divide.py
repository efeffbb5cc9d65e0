"""Layers of a model divided by a plan.

Parameters become DTensors, so that FSDP2 and distributed checkpoints know their layout. Activations stay plain tensors:
the layers compute on the local parts and call the group's collectives, which costs less than DTensor's dispatch.

With sequence parallelism the activations between the divided parts are divided, too, by positions: a sum over ranks is
scattered among them, and gathered before the next divided part (V. A. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022). The division of layers follows M. Shoeybi et al., "Megatron-LM"
(2019).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sparkdl.errors import ParamError
from sparkdl.parallel.collectives import begin_equal, gather, gather_and_reduce_gradient, split
from sparkdl.parallel.replaced_parameters import noting_replaced_parameters, tie_again
from sparkdl.parallel.sharding import blocks_of
from sparkdl.parallel.tensor.experts import divide_experts
from sparkdl.parallel.tensor.layers import Division, TensorParallelLayer, compute_with_parts, positions_of
from sparkdl.parallel.tensor.plan import (
    divided_layers,
    placement_of,
    shared_key_features,
    tied_parameters,
    with_whole_outputs,
)
from sparkdl.parallel.verify.divided import TensorVerification

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch.distributed.device_mesh import DeviceMesh


def divide(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
    whole_outputs: bool = False,
    verify: bool | None = None,
) -> nn.Module:
    """Divide the layers of a module among the ranks of a mesh of one dimension, in place.

    Each rank keeps its part of the divided parameters; all parameters become DTensors. The module's inputs and outputs
    stay the same, except that a ``colwise`` head returns this rank's part of the vocabulary, for :func:`cross_entropy`.

    Args:
        module: the whole model, or a model on the meta device. All ranks begin with the weights and buffers of the
            first one.
        mesh: mesh of the tensor-parallel ranks, such as ``layout.mesh["tensor"]``.
        plan: styles by module names; the plan that the module carries if None.
        whole_outputs: whether a ``colwise`` head returns the whole vocabulary, for losses that do not support parts of
            it. A head is a ``colwise`` layer without a ``rowwise`` layer in the same parent module.
        sequence: whether the activations between the divided parts are divided, too, by positions. The modules whose
            children are ``colwise`` then take sequences as their first argument or as ``hidden_states``, and the layers
            of the list that the plan names with its first ``*`` take and return divided sequences.
        verify: whether the ranks check in every step that they have the same rows and gradients, and that divided
            layers compute what whole ones do; False for never, None for the first step.

    Returns:
        ``module``. Its parameters are new ones: make the optimizer afterwards.

    Raises:
        ParamError: if the plan names modules that do not exist, a style is unknown or does not suit the layer, a size
            cannot be divided by the number of ranks, or the module is divided already; nothing is changed in these
            cases.
    """
    # No loop here, whose variable would keep the last parameter in memory.
    again = next(
        (name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None
    )
    if again is not None:
        raise ParamError(f"{again!r} is divided among ranks already. Call divide() once, and before shard().")
    divided = divided_layers(module, mesh.size(), plan)
    if whole_outputs:
        divided = dict(with_whole_outputs(divided))
    blocks = _blocks_of(module, divided) if sequence else None
    group = mesh.get_group()
    begin_equal(module, group)
    tied = tied_parameters(module, divided)
    division = Division(group)
    verification = TensorVerification(module, division, verify)

    def join(part: Tensor) -> Tensor:
        return gather(part, group, positions_of(part)).contiguous()

    with noting_replaced_parameters(module, "divide()"):
        _attach(module, divided, mesh, blocks, division, verification)
        tie_again(module, tied)
    # Not a set: its order would differ between ranks.
    parents = dict.fromkeys(
        name.rpartition(".")[0] for name, (_, style) in divided.items() if style.startswith("colwise")
    )
    for name in parents:
        parent, in_parts = module.get_submodule(name), blocks is not None and name.startswith(f"{blocks}.")
        parent.register_forward_hook(division.forget_copy, always_call=True)
        if in_parts:
            parent.register_forward_pre_hook(
                # Contiguous, or each layer inside would keep a copy of its own for the backward pass.
                _on_sequence(
                    lambda x: (
                        x
                        if division.is_whole
                        else gather_and_reduce_gradient(x, group, positions_of(x)).contiguous()
                    )
                ),
                with_kwargs=True,
            )
        styles = {style for other, (_, style) in divided.items() if other.rpartition(".")[0] == name}
        if name and any(style.startswith("rowwise") for style in styles):
            verification.watch_output(name, parent, output=join if in_parts else None)
    if blocks is not None:
        _divide_sequences(module.get_submodule(blocks), group)
        for number, block in enumerate(module.get_submodule(blocks).children()):
            verification.watch_output(f"{blocks}.{number}", block, inputs=_on_sequence(join), output=join)
    return module


def _attach(
    module: nn.Module,
    divided: Mapping[str, tuple[nn.Module, str]],
    mesh: DeviceMesh,
    blocks: str | None,
    division: Division,
    verification: TensorVerification,
) -> None:
    """Place the parameters of all layers, and make each compute with this rank's parts."""
    with_whole_features = _modules_with_whole_features(divided, blocks)
    undivided: dict[nn.Module, TensorParallelLayer] = {}
    for name, layer in list(module.named_modules()):
        if (not layer._parameters and name not in divided) or getattr(layer, "is_elsewhere", False):
            continue
        in_parts = blocks is not None and name.startswith(f"{blocks}.")
        if name in divided:
            style = divided[name][1]
        else:
            style = "replicated" if in_parts and not name.startswith(tuple(with_whole_features)) else "whole"
        names = list(layer._parameters)
        by_themselves = {parameter for parameter in names if f"{name}.{parameter}".lstrip(".") in divided}
        _place_parameters(layer, style, mesh, by_themselves)
        if style == "experts":
            divide_experts(layer, division, in_parts=in_parts)
            verification.watch_output(name, layer)
            if not in_parts:
                verification.watch_input(name, layer)
            continue
        shared = shared_key_features(module, name) if style == "mla_kv_a_proj" else 0
        attached = TensorParallelLayer(
            layer, style, division, in_parts=in_parts, divided_parameters=by_themselves, shared=shared
        )
        if style not in ("whole", "replicated", "rowwise"):  # its inputs are equal on all ranks
            verification.watch_input(name, layer)
        if style == "whole" or (shared and not in_parts):
            # Every rank computes the gradients of the parameters that are not divided by themselves.
            verification.watch_gradients(name, sorted(set(names) - by_themselves))
        if name not in divided and not by_themselves:
            undivided[layer] = attached
    for block in blocks_of(module):
        compute_with_parts(block, undivided)


def _place_parameters(layer: nn.Module, style: str, mesh: DeviceMesh, by_themselves: Collection[str]) -> None:
    """Make the parameters of a layer DTensors; those in ``by_themselves`` are divided by themselves."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        # All ranks have the same weights by now, or none yet (on the meta device).
        placements = [placement_of("colwise" if name in by_themselves else style, name)]
        part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _modules_with_whole_features(
    divided: Mapping[str, tuple[nn.Module, str]], blocks: str | None
) -> list[str]:
    """Return the name prefixes of the modules in blocks whose divided layers gather their outputs.

    The other layers of these modules compute the same on all ranks.
    """
    styles: dict[str, set[str]] = {}
    for name, (_, style) in divided.items():
        styles.setdefault(name.rpartition(".")[0], set()).add(style)
    return [
        f"{parent}."
        for parent, styles_of_parent in styles.items()
        if parent.startswith(f"{blocks}.")
        and "colwise_gather_output" in styles_of_parent
        and "colwise" not in styles_of_parent
    ]


def _blocks_of(module: nn.Module, divided: Mapping[str, tuple[nn.Module, str]]) -> str:
    """The name of the list of blocks whose layers are divided."""
    lists = {
        match[1]
        for name, (_, style) in divided.items()
        if style == "colwise" and (match := re.match(r"(.*?)\.\d+\.", name))
    }
    if len(lists) != 1 or not isinstance(module.get_submodule(min(lists)), nn.ModuleList):
        raise ParamError(
            "Sequence parallelism needs one torch.nn.ModuleList of blocks with colwise layers; the plan has "
            f"{', '.join(map(repr, sorted(lists))) or 'none'}. Use sequence=False."
        )
    return lists.pop()


def _divide_sequences(blocks: nn.Module, group: dist.ProcessGroup) -> None:
    """Make the blocks of a model take and return parts of sequences."""
    assert isinstance(blocks, nn.ModuleList)
    blocks[0].register_forward_pre_hook(
        _on_sequence(lambda x: split(x, group, positions_of(x))), with_kwargs=True
    )
    blocks[-1].register_forward_hook(
        lambda _module, _args, output: (
            (gather(output[0], group, positions_of(output[0])), *output[1:])
            if isinstance(output, tuple)
            else gather(output, group, positions_of(output))
        )
    )


def _on_sequence(change: Any) -> Any:
    """A pre-forward hook that applies ``change`` to the sequence that a module takes."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook
