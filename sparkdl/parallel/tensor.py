"""Tensor parallelism: the weights and the arithmetic of layers divided among the ranks of a group.

A plan maps module names to the style in which each module is divided; a ``*`` stands for one part of a name. Styles
have the names that Hugging Face's plans use:

============================  ========================================================================================
``colwise``                   a linear layer's outputs are divided: each rank computes some of the output features
``colwise_gather_output``     the same, and every rank gets all output features (also ``colwise_rep``)
``rowwise``                   a linear layer's inputs are divided: the output is summed over the ranks' input features
``rowwise_split_input``       the same for an input that every rank has whole (also ``rowwise_rep``)
``embedding_rowwise``         the rows of an embedding, its vocabulary, are divided
``replicated``                every rank has the whole layer, inside of a divided part: gradients are summed (also
                              ``replicated_with_grad_allreduce``)
``experts``                   the experts of a mixture are divided, see :mod:`.experts` (also ``moe_tp_experts``)
``mla_kv_a_proj``             every rank has the whole layer, a linear one whose last ``qk_rope_head_dim`` outputs are a
                              key that all heads share, and whose other outputs go to a ``colwise`` layer: the
                              gradient of the key is summed (multi-head latent attention)
============================  ========================================================================================

``colwise`` may also name a parameter of a module that computes with the features or heads of divided layers, such as
one number for each head: each rank has the first dimension's part. ``local_params``, which Hugging Face's plans give
such a module, and ``replicate`` change nothing: all modules compute with this rank's parts, and layers that a plan
does not name are whole.

Parameters become DTensors, so that FSDP2 and distributed checkpoints know their layout. Activations stay plain tensors:
the layers compute on the local parts and call the group's collectives, which costs less than DTensor's dispatch.

With sequence parallelism the activations between the divided parts are divided, too, by positions: a sum over ranks is
scattered among them, and gathered before the next divided part (V. A. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022). The division of layers follows M. Shoeybi et al., "Megatron-LM"
(2019).
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sparkdl.errors import ParamError
from sparkdl.parallel.collectives import (
    apply,
    gather,
    gather_summed,
    split,
    sum_gradient,
    sum_of_ranks,
    sum_scattered,
)
from sparkdl.parallel.experts import DividedExperts, check_experts
from sparkdl.parallel.sharding import blocks_of
from sparkdl.parallel.tensor_checks import Alike, ComparedOnce, check_heads, defer_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh

_SYNONYMS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated",
    "moe_tp_experts": "experts",
}

STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "replicated",
    "experts",
    "mla_kv_a_proj",
)

_WITHOUT_EFFECT = ("local_params", "replicate")
_PACKED = ("packed_colwise", "packed_rowwise")


def tensor_plan_of(module: nn.Module) -> dict[str, str]:
    """Return the plan that a model carries: its ``tensor_plan``, or the ``tp_plan`` of a Hugging Face model.

    Raises:
        ParamError: if it carries none.
    """
    for attribute in ("tensor_plan", "tp_plan"):
        plan = getattr(module, attribute, None)
        if plan:
            return dict(plan)
    raise ParamError(
        f"{type(module).__name__} carries no plan for tensor parallelism. Give one, such as "
        "{'layers.*.attention.query': 'colwise', 'layers.*.attention.output': 'rowwise'}, or use shard= in place of "
        "tensor=, which needs none."
    )


def divide(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
    whole_outputs: bool = False,
) -> nn.Module:
    """Divide the layers of a module among the ranks of a mesh of one dimension, in place.

    Each rank keeps its part of the divided parameters; all parameters become DTensors. The module's inputs and outputs
    stay the same, except that a ``colwise`` head returns this rank's part of the vocabulary, for :func:`cross_entropy`.

    Args:
        module: the whole model, the same on all ranks, or on the meta device.
        mesh: mesh of the tensor-parallel ranks, such as ``layout.mesh["tensor"]``.
        plan: styles by module names; the plan that the module carries if None.
        whole_outputs: whether a ``colwise`` head returns the whole vocabulary, for losses that do not support parts of
            it. A head is a ``colwise`` layer without a ``rowwise`` layer in the same parent module.
        sequence: whether the activations between the divided parts are divided, too, by positions. The modules whose
            children are ``colwise`` then take sequences as their first argument or as ``hidden_states``, and the layers
            of the list that the plan names with its first ``*`` take and return divided sequences.

    Returns:
        ``module``.

    Raises:
        ParamError: if the plan names modules that do not exist, a style is unknown or does not suit the layer, or a
            size cannot be divided by the number of ranks; nothing is changed in these cases.
    """
    divided = divided_layers(module, mesh.size(), plan)
    if whole_outputs:
        divided = dict(_with_whole_outputs(divided))
    blocks = _blocks_of(module, divided) if sequence else None
    group = mesh.get_group()
    tied = _tied_parameters(module, divided)
    inputs, alike, compared = _SharedInputs(group), Alike(group), ComparedOnce()
    if getattr(module, "is_pipeline_stage", False):
        defer_checks(module, alike, compared)

    def join(part: Tensor) -> Tensor:
        return gather(part, group, _positions_of(part)).contiguous()

    _attach(module, divided, mesh, blocks, inputs, alike, compared)
    _tie_again(module, tied)
    # Not a set: its order would differ between ranks.
    parents = dict.fromkeys(
        name.rpartition(".")[0] for name, (_, style) in divided.items() if style.startswith("colwise")
    )
    for name in parents:
        joined = {style for other, (_, style) in divided.items() if other.rpartition(".")[0] == name}
        if name and any(style.startswith("rowwise") for style in joined):
            compared.watch(name, module.get_submodule(name))
        module.get_submodule(name).register_forward_hook(inputs.forget, always_call=True)
        if blocks is not None and name.startswith(f"{blocks}."):
            module.get_submodule(name).register_forward_pre_hook(
                _on_sequence(
                    lambda x: x if compared.is_joined else gather_summed(x, group, _positions_of(x))
                ),
                with_kwargs=True,
            )
    if blocks is not None:
        _divide_sequences(module.get_submodule(blocks), group)
        for number, block in enumerate(module.get_submodule(blocks).children()):
            compared.watch_sequences(f"{blocks}.{number}", block, join, _on_sequence(join))
    return module


def _attach(
    module: nn.Module,
    divided: Mapping[str, tuple[nn.Module, str]],
    mesh: DeviceMesh,
    blocks: str | None,
    inputs: _SharedInputs,
    alike: Alike,
    compared: ComparedOnce,
) -> None:
    """Place the parameters of all layers, and make each compute with this rank's parts."""
    group = mesh.get_group()
    with_whole_features = _modules_with_whole_features(divided, blocks)
    undivided: dict[nn.Module, _Divided] = {}
    for name, layer in list(module.named_modules()):
        if (not layer._parameters and name not in divided) or getattr(layer, "is_elsewhere", False):
            continue
        in_parts = blocks is not None and name.startswith(f"{blocks}.")
        if name in divided:
            style = divided[name][1]
        else:
            style = "replicated" if in_parts and not name.startswith(tuple(with_whole_features)) else "whole"
        own = frozenset(each for each in layer._parameters if f"{name}.{each}".lstrip(".") in divided)
        _place_parameters(layer, style, mesh, own)
        if style == "experts":
            DividedExperts(name, group, alike, compared, in_parts=in_parts).attach(layer)
            continue
        shared = _shared_key_features(module, name) if style == "mla_kv_a_proj" else 0
        attached = _Divided(
            name, style, group, inputs, alike, compared, in_parts=in_parts, own=own, shared=shared
        )
        attached.attach(layer)
        if name not in divided and not own:
            undivided[layer] = attached
    for block in blocks_of(module):
        _Readable(block, undivided)


def divided_layers(
    module: nn.Module, size: int, plan: Mapping[str, str] | None = None
) -> dict[str, tuple[nn.Module, str]]:
    """The layers that :func:`divide` divides among ``size`` ranks, by name, each with its style.

    Single parameters of other modules are among them by their names, with the module.

    Raises:
        ParamError: if they cannot be divided among so many ranks.
    """
    is_carried = plan is None
    plan, parameters = _sorted_plan(
        module, tensor_plan_of(module) if plan is None else plan, is_carried=is_carried
    )
    matches = _matches(module, plan, is_carried=is_carried)
    divided = {name: (layer, style) for name, layer, style in matches}
    for name, (layer, style) in divided.items():
        _check(name, layer, style, size)
        if style == "mla_kv_a_proj":
            _shared_key_features(module, name)
    for name, style in parameters.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        _check_parameter(name, owner, style, size)
        divided[name] = owner, style
    check_heads(module, divided, size)
    _tied_parameters(module, divided)
    return divided


def plan_with_whole_outputs(module: nn.Module, size: int) -> dict[str, str]:
    """The style of each divided layer if heads return whole vocabularies; for a model that is cut into stages later.

    Raises:
        ParamError: see :func:`divided_layers`.
    """
    return {name: style for name, (_, style) in _with_whole_outputs(divided_layers(module, size))}


def plan_of_stage(plan: Mapping[str, str], stage: nn.Module) -> dict[str, str]:
    """The entries of a whole model's plan, as :func:`plan_with_whole_outputs` makes it, for a stage of a pipeline."""
    names = {name for name, _ in (*stage.named_modules(), *stage.named_parameters())}
    return {name: style for name, style in plan.items() if name in names}


def _sorted_plan(
    module: nn.Module, plan: Mapping[str, str], *, is_carried: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The entries of a plan that name layers, and the parameters that other entries name, with their styles.

    Entries without effect are left out, and those of a plan that the model carries for another variant of it: in
    transformers one plan names, for example, both ``q_proj`` and ``q_b_proj``, of which an attention has one.

    Raises:
        ParamError: if the plan divides packed layers.
    """
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters(remove_duplicate=False))
    experts = tuple(f"{name}." for name, style in plan.items() if _SYNONYMS.get(style, style) == "experts")
    kept: dict[str, str] = {}
    single: dict[str, str] = {}
    for pattern, style in plan.items():
        if pattern.startswith(experts):
            continue  # the experts are divided, not the features of each
        named = _named_like(pattern, modules)
        found = [] if named else _named_like(pattern, parameters)
        if named and style in _PACKED:
            raise ParamError(
                f"The plan divides {pattern!r} in the style {style!r}. Of a layer that joins several projections, each "
                "rank would need parts in several places, which checkpoints cannot describe. Make one layer of each "
                "projection and divide these by 'colwise' or 'rowwise', or use 'colwise_gather_output', which every "
                "rank's next layer gets whole."
            )
        single.update(dict.fromkeys(found, style))
        is_variant = is_carried and not named and _is_of_variant(pattern, plan, modules)
        if not found and not is_variant and not (named and style in _WITHOUT_EFFECT):
            kept[pattern] = style
    return kept, single


def _is_of_variant(pattern: str, plan: Mapping[str, str], modules: Mapping[str, nn.Module]) -> bool:
    """Whether modules of transformers lack a part that the plan names, and have another part that it names."""
    parent = pattern.rpartition(".")[0]
    while parent and not _named_like(parent, modules):
        parent = parent.rpartition(".")[0]
    are_of_transformers = [
        type(modules[name]).__module__.startswith("transformers") for name in _named_like(parent, modules)
    ]
    others = [other for other in plan if other.startswith(f"{parent}.")]
    return bool(parent) and any(are_of_transformers) and any(_named_like(other, modules) for other in others)


def _matches(
    module: nn.Module, plan: Mapping[str, str], *, is_carried: bool
) -> Iterator[tuple[str, nn.Module, str]]:
    names = dict(module.named_modules())
    elsewhere = {name for name, layer in names.items() if getattr(layer, "is_elsewhere", False)}
    experts = [name for name, style in plan.items() if _SYNONYMS.get(style, style) == "experts"]
    for pattern, given in plan.items():
        style = _SYNONYMS.get(given, given)
        if pattern.startswith(tuple(f"{name}." for name in experts)):
            continue  # Hugging Face's plans divide the features of each expert; here the experts are divided
        if any(pattern == name or pattern.startswith(f"{name}.") for name in elsewhere):
            continue  # another pipeline stage has it
        found = [name for name in _named_like(pattern, names) if name not in elsewhere]
        if not found:
            parents = (name.rpartition(".")[0] for name in experts)
            if is_carried and any(
                pattern.startswith(f"{parent}.") and _named_like(parent, names) for parent in parents
            ):
                continue  # a layer is a mixture or is not, and a model's plan names the parts of both kinds
            last = pattern.rpartition(".")[2]
            like = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names if name.endswith(last)})[:3]
            hint = f" Did you mean {', '.join(map(repr, like))}?" if like else ""
            raise ParamError(
                f"The plan names the module {pattern!r}, which {type(module).__name__} does not have.{hint}"
            )
        if style not in STYLES:
            raise ParamError(
                f"The plan divides {pattern!r} in the style {given!r}, which sparkdl does not know; it knows "
                f"{', '.join(STYLES)}."
            )
        for name in found:
            yield name, names[name], style


def _named_like(pattern: str, names: Iterable[str]) -> list[str]:
    parts = ("[^.]+" if part == "*" else fnmatch.translate(part)[4:-3] for part in pattern.split("."))
    expression = re.compile(r"\.".join(parts))
    return [name for name in names if expression.fullmatch(name)]


def _with_whole_outputs(
    divided: Mapping[str, tuple[nn.Module, str]],
) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    joined = {name.rpartition(".")[0] for name, (_, style) in divided.items() if style.startswith("rowwise")}
    for name, (layer, style) in divided.items():
        is_linear = isinstance(layer, nn.Linear)  # not a single parameter
        is_head = is_linear and style == "colwise" and name.rpartition(".")[0] not in joined
        yield name, (layer, "colwise_gather_output" if is_head else style)


def _check(name: str, layer: nn.Module, style: str, size: int) -> None:
    if style == "replicated":
        return
    if style == "experts":
        check_experts(name, layer, size)
        return
    wanted = nn.Embedding if style.startswith("embedding") else nn.Linear
    if not isinstance(layer, wanted):
        raise ParamError(
            f"The plan divides {name!r} in the style {style!r}, which takes a torch.nn.{wanted.__name__}; it is a "
            f"{type(layer).__name__}."
        )
    if isinstance(layer, nn.Embedding):
        length, what = layer.num_embeddings, "rows"
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise ParamError(
                    f"{name!r} is an embedding with {option}={getattr(layer, option)!r}, which cannot be computed from "
                    f"a part of its rows. Make it without {option}, or leave it out of the plan."
                )
    elif style == "mla_kv_a_proj":
        return
    elif isinstance(layer, nn.Linear):
        length, what = (
            (layer.out_features, "output features")
            if style.startswith("colwise")
            else (layer.in_features, "input features")
        )
    if length % size:
        raise ParamError(
            f"{name!r} has {length} {what}, which {size} tensor-parallel ranks cannot divide. Use a tensor size that "
            f"divides {length}."
        )


def _check_parameter(name: str, owner: nn.Module, style: str, size: int) -> None:
    parameter = owner.get_parameter(name.rpartition(".")[2])
    if isinstance(owner, nn.Linear | nn.Embedding):
        raise ParamError(
            f"The plan names {name!r}, a parameter of a {type(owner).__name__}. Name the layer, "
            f"{name.rpartition('.')[0]!r}, instead."
        )
    if style != "colwise" or parameter.ndim not in (1, 2):
        raise ParamError(
            f"The plan divides the parameter {name!r} of shape {tuple(parameter.shape)} in the style {style!r}. Single "
            "parameters are divided in the style 'colwise', and have one or two dimensions. Leave it, and the layers "
            "that compute with it, out of the plan."
        )
    if len(parameter) % size:
        raise ParamError(
            f"{name!r} has the length {len(parameter)}, which {size} tensor-parallel ranks cannot divide. Use a tensor "
            f"size that divides {len(parameter)}."
        )


def _shared_key_features(module: nn.Module, name: str) -> int:
    """The number of output features of a layer, the last ones, that are a key which all heads share.

    It is ``qk_rope_head_dim`` of the closest module around the layer that has it, or of its ``config``.

    Raises:
        ParamError: if no module has it, or the layer does not have more output features.
    """
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        holder = module.get_submodule(parent)
        for each in (holder, getattr(holder, "config", None)):
            features = getattr(each, "qk_rope_head_dim", None)
            if not isinstance(features, int):
                continue
            outputs = cast("nn.Linear", module.get_submodule(name)).out_features
            if not 0 < features < outputs:
                raise ParamError(
                    f"{name!r} has {outputs} output features, of which qk_rope_head_dim = {features} would be a key "
                    "that all heads share. The style 'mla_kv_a_proj' needs features before it; leave the layer out of "
                    "the plan."
                )
            return features
    raise ParamError(
        f"The plan divides {name!r} in the style 'mla_kv_a_proj', and no module around it says how many of its output "
        "features are a key that all heads share. Give the module an attribute qk_rope_head_dim."
    )


def _placement(style: str, name: str) -> Shard | Replicate:
    """How a parameter with this name is divided in a layer of this style."""
    if style.startswith(("colwise", "experts")) or (style.startswith("embedding") and name == "weight"):
        return Shard(0)
    return Shard(1) if style.startswith("rowwise") and name == "weight" else Replicate()


def _place_parameters(layer: nn.Module, style: str, mesh: DeviceMesh, own: Collection[str]) -> None:
    """Make the parameters of a layer DTensors; those in ``own`` are divided by themselves."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        # No rank broadcasts its weights: all ranks have the same ones, or none yet (on the meta device).
        placements = [_placement("colwise" if name in own else style, name)]
        part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _tied_parameters(module: nn.Module, divided: Mapping[str, tuple[nn.Module, str]]) -> list[list[str]]:
    """The names of each parameter that has several names; first those of layers that compute in this stage.

    Raises:
        ParamError: if the plan divides one parameter in different ways.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    elsewhere = {name for name, layer in module.named_modules() if getattr(layer, "is_elsewhere", False)}
    tied = [
        sorted(several, key=lambda name: name.rpartition(".")[0] in elsewhere)
        for several in names.values()
        if len(several) > 1
    ]
    for several in tied:
        placements = set()
        for name in several:
            parent, _, last = name.rpartition(".")
            if parent in elsewhere:
                continue
            placements.add(_placement(divided[parent][1] if parent in divided else "whole", last))
        if len(placements) > 1:
            raise ParamError(
                f"{' and '.join(map(repr, several))} are one parameter, and the plan divides it in different ways. "
                "Divide an embedding by 'embedding_rowwise' and the head with its weights by 'colwise', or neither."
            )
    return tied


def _tie_again(module: nn.Module, tied: list[list[str]]) -> None:
    for first, *others in tied:
        for name in others:
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent).register_parameter(last, module.get_parameter(first))


class _SharedInputs:
    """Gives ``colwise`` layers with the same input one copy of it, so that its gradient is summed over ranks once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[weakref.ref[Tensor], Tensor] | None = None

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor whose gradient is summed over the ranks."""
        if self._last is not None and self._last[0]() is tensor:
            return self._last[1]
        copied = sum_gradient(tensor, self._group)
        self._last = weakref.ref(tensor), copied
        return copied

    def forget(self, *_: object) -> None:
        """Drop the last tensor, whose graph would otherwise stay in memory."""
        self._last = None


class _Divided:
    """Makes a layer compute with this rank's part of its parameters, and adds the collectives that its style needs.

    Args:
        name: name of the layer.
        style: style in the plan, or ``whole`` for a layer that the plan does not name.
        group: process group of the tensor-parallel ranks.
        inputs: copies of inputs, shared by the layers that may take the same tensor.
        alike: check of the tensors that every rank has whole.
        compared: comparison of the outputs of divided layers with those of whole ones.
        in_parts: whether the layer lies where sequences are divided.
        own: names of the parameters that the plan divides by themselves.
        shared: number of the last output features that all heads share, in the style ``mla_kv_a_proj``.
    """

    def __init__(
        self,
        name: str,
        style: str,
        group: dist.ProcessGroup,
        inputs: _SharedInputs,
        alike: Alike,
        compared: ComparedOnce,
        *,
        in_parts: bool,
        own: Collection[str],
        shared: int,
    ) -> None:
        self._name = name
        self._style = style
        self._group = group
        self._inputs = inputs
        self._alike = alike
        self._compared = compared
        self._in_parts = in_parts
        self._own = own
        self._shared = shared
        self._rank = dist.get_rank(group)

    def attach(self, layer: nn.Module) -> None:
        """Wrap the layer's ``forward``: a hook would not run when a block is recomputed."""
        layer.forward = functools.partial(self._forward, layer, layer.forward)

    def _forward(self, layer: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        kept = dict(layer._parameters)
        if self._compared.is_whole:
            return self._forward_whole(layer, forward, *args, **kwargs)
        parts = self.parts_of(layer)
        bias = outside = None
        if self._style.startswith("rowwise"):
            bias, parts["bias"] = parts.get("bias"), None  # added once, after the sum over ranks
        if self._style not in ("whole", "replicated"):
            first, *others = args or (kwargs.pop(next(iter(kwargs))),)
            if self._style != "rowwise":
                self._alike.check_input(self._name, first)
            if self._style == "embedding_rowwise":
                first, outside = self._own_rows(first, parts["weight"])
            elif self._style == "rowwise_split_input":
                first = split(first, self._group, first.ndim - 1)
            elif self._style.startswith("colwise") and not self._in_parts:
                first = self._inputs.copy_of(first)
            args = (first, *others)
        layer._parameters.update(parts)  # type: ignore[arg-type]  # for this call
        try:
            with self._own_padding(layer) if outside is not None else nullcontext():
                output = forward(*args, **kwargs)
        finally:
            layer._parameters.update(kept)
        if outside is not None:
            output = output.masked_fill(outside.unsqueeze(-1), 0.0)
        return self._joined(output, bias)

    def parts_of(self, layer: nn.Module) -> dict[str, Tensor | None]:
        """This rank's parts of the layer's parameters, with gradients; compared in the first step if they are whole."""
        parts = {name: self._part_of(name, parameter) for name, parameter in layer._parameters.items()}
        if self._style == "whole" or (self._shared and not self._in_parts):
            whole = {name: part for name, part in parts.items() if name not in self._own}
            self._alike.watch_gradients(self._name, whole)
        return parts

    def _forward_whole(
        self, layer: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute with whole parameters, as if the layer were not divided; the inputs are whole."""
        kept = dict(layer._parameters)
        whole = {
            name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in kept.items()
        }
        layer._parameters.update(whole)
        try:
            output: Any = forward(*args, **kwargs)
        finally:
            layer._parameters.update(kept)
        if self._in_parts and self._style.startswith("rowwise") and not self._compared.is_joined:
            output = split(output, self._group, _positions_of(output))
        return output

    def _joined(self, output: Any, bias: Tensor | None) -> Any:
        """Combine this rank's output with those of the other ranks, as the style needs it."""
        if self._style == "embedding_rowwise":
            return sum_of_ranks(output, self._group)
        if self._style == "colwise_gather_output":
            return gather(output, self._group, output.ndim - 1)
        if self._style.startswith("rowwise"):
            if self._in_parts:
                output = sum_scattered(output, self._group, _positions_of(output))
            else:
                output = sum_of_ranks(output, self._group)
            return output if bias is None else output + bias
        if self._shared and not self._in_parts:
            features, key = output.split([output.shape[-1] - self._shared, self._shared], dim=-1)
            return torch.cat([features, sum_gradient(key, self._group)], dim=-1)
        return output

    def _part_of(self, name: str, parameter: nn.Parameter | None) -> Tensor | None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        # Where sequences are divided, all that a layer computes between divided ones has a share of the gradient.
        has_shares = self._in_parts and (self._shared > 0 or self._style.startswith("rowwise"))
        is_summed = self._style == "replicated" or has_shares
        if name in self._own or not isinstance(parameter, DTensor):
            return local  # a part already: see _Readable
        # Gradients are summed for layers that see other positions or heads on each rank, and for biases added to them.
        if local is None or not is_summed or (self._style.startswith("rowwise") and local.ndim > 1):
            return local
        return sum_gradient(local, self._group)

    def _own_rows(self, tokens: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of the tokens in this rank's part of an embedding, and a mask of the tokens that have no row there."""
        assert weight is not None
        rows = tokens - self._rank * weight.shape[0]
        outside = (rows < 0) | (rows >= weight.shape[0])
        return rows.masked_fill(outside, 0), outside

    @contextmanager
    def _own_padding(self, layer: nn.Module) -> Iterator[None]:
        """Context in which ``padding_idx``, whose row gets no gradient, counts in this rank's part of an embedding."""
        assert isinstance(layer, nn.Embedding)
        whole = layer.padding_idx
        if whole is not None:
            own = whole - self._rank * layer.weight.shape[0]
            layer.padding_idx = own if 0 <= own < layer.weight.shape[0] else None
        try:
            yield
        finally:
            layer.padding_idx = whole


class _Readable:
    """Makes the parameters of a block's undivided layers plain tensors while the block computes.

    The forward method of a module may compute with the weights of a layer inside of it and not call the layer, as
    linear attention does with those of its convolution.

    Args:
        block: the block; its forward method is wrapped.
        undivided: the layers that are not divided, with what makes them compute with their parts.
    """

    def __init__(self, block: nn.Module, undivided: Mapping[nn.Module, _Divided]) -> None:
        self._layers = [
            (layer, undivided[layer], [block.get_submodule(path) for path in _paths_to(name)])
            for name, layer in block.named_modules()
            if name and layer in undivided
        ]
        block.forward = functools.partial(self._forward, block.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept = []
        for layer, divided, around in self._layers:
            # A part of the block that is sharded by itself gathers its weights when it is called.
            if any(isinstance(each, FSDPModule) for each in around):
                continue
            kept.append((layer, dict(layer._parameters)))
            layer._parameters.update(cast("Any", divided.parts_of(layer)))  # for this call
        try:
            return forward(*args, **kwargs)
        finally:
            for layer, parameters in kept:
                layer._parameters.update(parameters)


def _paths_to(name: str) -> Iterator[str]:
    """The names of the modules on the path to a module, it included."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def _modules_with_whole_features(
    divided: Mapping[str, tuple[nn.Module, str]], blocks: str | None
) -> list[str]:
    """Name prefixes of modules in blocks that gather outputs: the rest of each is the same on all ranks."""
    styles: dict[str, set[str]] = {}
    for name, (_, style) in divided.items():
        styles.setdefault(name.rpartition(".")[0], set()).add(style)
    return [
        f"{parent}."
        for parent, found in styles.items()
        if parent.startswith(f"{blocks}.") and "colwise_gather_output" in found and "colwise" not in found
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


def _positions_of(activations: Tensor) -> int:
    """The dimension of positions: of ``(batch, positions, features)``, or of ``(tokens, features)`` of some layers."""
    return 1 if activations.ndim > 2 else 0


def _divide_sequences(blocks: nn.Module, group: dist.ProcessGroup) -> None:
    """Make the blocks of a model take and return parts of sequences."""
    assert isinstance(blocks, nn.ModuleList)
    blocks[0].register_forward_pre_hook(
        _on_sequence(lambda x: split(x, group, _positions_of(x))), with_kwargs=True
    )
    blocks[-1].register_forward_hook(
        lambda _module, _args, output: (
            (gather(output[0], group, _positions_of(output[0])), *output[1:])
            if isinstance(output, tuple)
            else gather(output, group, _positions_of(output))
        )
    )


def _on_sequence(change: Any) -> Any:
    """A pre-forward hook that applies ``change`` to the sequence that a module takes."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def cross_entropy(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup, *, ignore_index: int = -100
) -> Tensor:
    """Mean cross entropy of logits whose classes are divided among ranks, without gathering them.

    Args:
        logits: logits of this rank's classes, ``(..., classes / ranks)``, as a ``colwise`` head returns them.
        labels: class indices among all classes, ``(...)`` integers, the same on all ranks.
        group: process group of the tensor-parallel ranks.
        ignore_index: label of positions that do not count.

    Returns:
        A scalar of at least float32, the same on all ranks, with gradients; NaN if no position counts, as in torch.

    Raises:
        ParamError: if a label is not a class index; for CUDA tensors a device-side assertion fails later, as in torch.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    losses = apply(_DividedCrossEntropy, flat, labels.reshape(-1), group, ignore_index)
    return losses.sum() / (labels != ignore_index).sum()


def _check_labels(labels: Tensor, classes: int, ignore_index: int) -> None:
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignore_index)
    if labels.is_cuda:
        torch._assert_async(~wrong.any(), f"a label is not among the {classes} classes")
    elif wrong.any():
        raise ParamError(
            f"The label {int(labels[wrong][0])} is none of the {classes} classes, 0 to {classes - 1}, and not "
            f"ignore_index, {ignore_index}."
        )


class _DividedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, ignore_index: int
    ) -> Tensor:
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        highest = values.amax(dim=-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (values - highest.unsqueeze(-1)).exp_()
        _check_labels(labels, logits.shape[-1] * dist.get_world_size(group), ignore_index)
        own = labels - dist.get_rank(group) * logits.shape[-1]
        is_here = (own >= 0) & (own < logits.shape[-1])
        own = own.masked_fill(~is_here, 0)
        label_logits = values.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill_(~is_here, 0.0)
        sums = torch.stack([exponentials.sum(-1), label_logits])
        dist.all_reduce(sums, group=group)
        counts = labels != ignore_index
        losses = torch.where(counts, sums[0].log() + highest - sums[1], 0.0)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), own, is_here, counts)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, own, is_here, counts = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient.scatter_add_(-1, own.unsqueeze(-1), -is_here.to(gradient.dtype).unsqueeze(-1))
        gradient.mul_((gradients[0] * counts).unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None
