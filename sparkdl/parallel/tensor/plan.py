"""Plans of tensor parallelism, and the checks that a model can be divided by them.

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
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from sparkdl.errors import ParamError, did_you_mean
from sparkdl.parallel.tensor.experts import check_divisible, check_experts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
        f"{type(module).__name__} carries no plan for tensor parallelism. Set model.tensor_plan, such as to "
        "{'layers.*.attention.query': 'colwise', 'layers.*.attention.output': 'rowwise'}, or use shard in place of "
        "tensor, which needs none."
    )


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
            shared_key_features(module, name)
    for name, style in parameters.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        _check_parameter(name, owner, style, size)
        divided[name] = owner, style
    check_heads(module, divided, size)
    tied_parameters(module, divided)
    return divided


def plan_with_whole_outputs(module: nn.Module, size: int) -> dict[str, str]:
    """The style of each divided layer if heads return whole vocabularies; for a model that is cut into stages later.

    Raises:
        ParamError: see :func:`divided_layers`.
    """
    return {name: style for name, (_, style) in with_whole_outputs(divided_layers(module, size))}


def plan_of_stage(plan: Mapping[str, str], stage: nn.Module) -> dict[str, str]:
    """Return the entries of :func:`plan_with_whole_outputs` that apply to one pipeline stage."""
    names = {name for name, _ in (*stage.named_modules(), *stage.named_parameters())}
    return {name: style for name, style in plan.items() if name in names}


def _sorted_plan(
    module: nn.Module, plan: Mapping[str, str], *, is_carried: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The entries of a plan that name layers, and the parameters that other entries name, with their styles.

    Entries without effect are left out, and those of a plan that the model carries for another variant of it: in
    transformers one plan names, for example, both ``q_proj`` and ``q_b_proj``, and an attention has one of them.

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
        names = [] if named else _named_like(pattern, parameters)
        if named and style in _PACKED:
            raise ParamError(
                f"The plan divides {pattern!r} in the style {style!r}. Of a layer that joins several projections, each "
                "rank would need parts in several places, which checkpoints cannot describe. Make one layer of each "
                "projection and divide these by 'colwise' or 'rowwise', or use 'colwise_gather_output', which every "
                "rank's next layer gets whole."
            )
        single.update(dict.fromkeys(names, style))
        is_variant = is_carried and not named and _is_of_variant(pattern, plan, modules)
        if not names and not is_variant and not (named and style in _WITHOUT_EFFECT):
            kept[pattern] = style
    return kept, single


def _is_of_variant(pattern: str, plan: Mapping[str, str], modules: Mapping[str, nn.Module]) -> bool:
    """Whether a transformers module lacks this entry but has another one of the plan."""
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
    for pattern, named_style in plan.items():
        style = _SYNONYMS.get(named_style, named_style)
        if any(pattern == name or pattern.startswith(f"{name}.") for name in elsewhere):
            continue  # another pipeline stage has it
        candidates = [name for name in _named_like(pattern, names) if name not in elsewhere]
        if not candidates:
            parents = (name.rpartition(".")[0] for name in experts)
            if is_carried and any(
                pattern.startswith(f"{parent}.") and _named_like(parent, names) for parent in parents
            ):
                continue  # a layer is a mixture or is not, and a model's plan names the parts of both kinds
            last = pattern.rpartition(".")[2]
            patterns = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})
            like = [candidate for candidate in patterns if candidate.endswith(last)][:3]
            hint = (
                f"Did you mean {', '.join(map(repr, like))}?"
                if like
                else did_you_mean(pattern, patterns, show=repr)
            )
            raise ParamError(
                f"The plan names the module {pattern!r}, which {type(module).__name__} does not have. {hint}".rstrip()
            )
        if style not in STYLES:
            raise ParamError(
                f"The plan divides {pattern!r} in the style {named_style!r}, which sparkdl does not know; it knows "
                f"{', '.join(STYLES)}."
            )
        for name in candidates:
            yield name, names[name], style


def _named_like(pattern: str, names: Iterable[str]) -> list[str]:
    parts = ("[^.]+" if part == "*" else fnmatch.translate(part)[4:-3] for part in pattern.split("."))
    expression = re.compile(r"\.".join(parts))
    return [name for name in names if expression.fullmatch(name)]


def with_whole_outputs(
    divided: Mapping[str, tuple[nn.Module, str]],
) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """The items of :func:`divided_layers`, with heads that gather their outputs."""
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
            f"The plan divides {name!r} in the style {style!r}, which takes a torch.nn.{wanted.__name__}, but it is a "
            f"{type(layer).__name__}. Choose another style, or leave this layer out of the plan."
        )
    if "weight" not in layer._parameters:
        raise ParamError(
            f"The plan divides {name!r}, whose weight is computed from other parameters, as by spectral_norm or "
            "weight_norm. Leave the layer out of the plan, or remove the norm."
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
    check_divisible(f"{name!r} has {length} {what}", length, size)


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
    check_divisible(f"{name!r} has the length {len(parameter)}", len(parameter), size)


def shared_key_features(module: nn.Module, name: str) -> int:
    """The number of a layer's last output features that form the key which all heads share.

    It is ``qk_rope_head_dim`` of the closest module around the layer that has it, or of its ``config``.

    Raises:
        ParamError: if no module has it, or the layer does not have more output features.
    """
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        holder = module.get_submodule(parent)
        for source in (holder, getattr(holder, "config", None)):
            features = getattr(source, "qk_rope_head_dim", None)
            if not isinstance(features, int):
                continue
            outputs = cast("nn.Linear", module.get_submodule(name)).out_features
            if not 0 < features < outputs:
                raise ParamError(
                    f"{name!r} has {outputs} output features, and qk_rope_head_dim = {features} of them would be a key "
                    "that all heads share. The style 'mla_kv_a_proj' needs features before it; leave the layer out of "
                    "the plan."
                )
            return features
    raise ParamError(
        f"The plan divides {name!r} in the style 'mla_kv_a_proj', and no module around it says how many of its output "
        "features are a key that all heads share. Give the module an attribute qk_rope_head_dim."
    )


def placement_of(style: str, name: str) -> Shard | Replicate:
    """How a parameter with this name is divided in a layer of this style."""
    if style.startswith(("colwise", "experts")) or (style.startswith("embedding") and name == "weight"):
        return Shard(0)
    return Shard(1) if style.startswith("rowwise") and name == "weight" else Replicate()


def tied_parameters(module: nn.Module, divided: Mapping[str, tuple[nn.Module, str]]) -> list[list[str]]:
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
            placements.add(placement_of(divided[parent][1] if parent in divided else "whole", last))
        if len(placements) > 1:
            raise ParamError(
                f"{' and '.join(map(repr, several))} are one parameter, and the plan divides it in different ways. "
                "Divide an embedding by 'embedding_rowwise' and the head with its weights by 'colwise', or neither."
            )
    return tied


def check_heads(module: nn.Module, divided: Mapping[str, tuple[nn.Module, str]], size: int) -> None:
    """Check that each rank gets whole attention heads, if the model says how many it has."""
    for prefix, config in _head_counts(module):
        name = next(
            (name for name, (_, style) in divided.items() if style == "colwise" and name.startswith(prefix)),
            None,
        )
        if name is None:
            continue
        for attribute, heads in config.items():
            if heads % size:
                fits = (
                    "shard or context in place of tensor"
                    if heads == 1
                    else f"a tensor size that divides {heads}"
                )
                raise ParamError(
                    f"The model has {attribute} = {heads}, which {size} tensor-parallel ranks cannot divide ({name!r} "
                    f"would be cut inside a head). Use {fits}."
                )


def check_heads_shared(module: nn.Module, method: str, size: int) -> None:
    """Check that context-parallel ranks can divide a model's attention heads, if it says how many it has.

    Raises:
        ParamError: if they cannot, and the method needs it.
    """
    for _, counts in _head_counts(module):
        heads = next(iter(counts.values()))
        if method == "all-to-all" and heads % size:
            raise ParamError(
                f"All-to-all attention divides {heads} heads among {size} ranks, which leaves a remainder. Use a "
                "context size that divides the number of heads, or attention='ring'."
            )


def _head_counts(module: nn.Module) -> Iterator[tuple[str, dict[str, int]]]:
    """Name prefixes of the modules that say how many attention heads they have, and the counts by attribute.

    Hugging Face models have a ``config``, decoders of sparkdl ``sizes``.
    """
    for name, layer in module.named_modules():
        for holder, attributes in (
            ("config", ("num_attention_heads", "num_key_value_heads")),
            ("sizes", ("heads", "key_heads")),
        ):
            names = {
                attribute: getattr(getattr(layer, holder, None), attribute, None) for attribute in attributes
            }
            counts = {attribute: heads for attribute, heads in names.items() if isinstance(heads, int)}
            if counts:
                yield f"{name}." if name else "", counts
