"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) over the frozen weights of a model, made by ``peft``.

peft is imported where it is needed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import errors_as, needing
from sparkdl.model.weights_file import map_weights, write_weights

if TYPE_CHECKING:
    from collections.abc import Collection


def with_adapters(model: nn.Module, rank: int, *, trained: Collection[str] | None = None) -> nn.Module:
    """Return the model with adapters over all its linear layers but the head, in which only they are trained.

    Args:
        model: model, which is changed.
        rank: rank of the adapters.
        trained: names of the submodules that are trained as a whole, such as a new last layer; all linear and
            convolutional layers but those in them get adapters. None for a language model, whose head stays as it is.

    Raises:
        ParamError: if peft is not installed, or knows no layer of the model.
    """
    with needing("Param loraRank", "lora", "peft"):
        from peft import LoraConfig, get_peft_model
    targets: str | list[str] = "all-linear"
    if trained is not None:
        targets = [
            name
            for name, layer in model.named_modules()
            if _takes_adapter(layer) and not any(f"{name}.".startswith(f"{part}.") for part in trained)
        ]
        if not targets:
            raise ParamError(
                f"Param loraRank is {rank}, and the model has no layers that peft has adapters for. Leave loraRank out."
            ).about("loraRank")
    with errors_as(ParamError, f"Param loraRank is {rank}, and peft makes no adapters for the model"):
        adapted: nn.Module = get_peft_model(
            model,
            LoraConfig(
                r=rank,
                lora_alpha=2 * rank,
                target_modules=targets,
                modules_to_save=None if trained is None else list(trained),
            ),
        )
    return adapted


def _takes_adapter(layer: nn.Module) -> bool:
    """Return whether a layer is called with its own weights: the output layer of nn.MultiheadAttention is not."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1
    return (
        type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"
    )  # transformers' name for a linear layer


def merge_adapters(network: nn.Module) -> None:
    """Replace adapted parts of a network by parts with the adapters merged into their weights."""
    for name, part in list(network.named_children()):
        if hasattr(part, "merge_and_unload"):
            setattr(network, name, merge_into_weights(part))


def merge_into_weights(decoder: Any) -> nn.Module:
    """Return the decoder with its adapters merged into its weights.

    The merged weights are written to files one after the other and mapped from them. Thus weights that were mapped from
    files do not all have to fit into the memory of this process.
    """
    if not hasattr(decoder, "merge_and_unload"):
        adapted: nn.Module = decoder
        return adapted
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder, torch.no_grad():
        path = Path(folder) / "merged.safetensors"
        for layer in decoder.modules():
            if not hasattr(layer, "get_delta_weight"):
                continue
            # The weights of several experts are one parameter, whose name is not "weight".
            owner, name = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")
            weight = getattr(owner, name)
            for adapter in layer.active_adapters:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
            with path.open("wb") as file:
                write_weights({"weight": weight}, file)
            setattr(owner, name, nn.Parameter(map_weights(path)["weight"], requires_grad=False))
            path.unlink()  # the mapping stays valid without the name
    plain: nn.Module = decoder.unload()
    return plain
