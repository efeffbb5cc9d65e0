"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) over the frozen weights of a model, made by ``peft``.

peft is imported where it is needed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import errors_as
from sparkdl.model.weights_file import map_weights, write_weights


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Return the model with adapters over all its linear layers but the head, in which only they are trained.

    Raises:
        ParamError: if peft is not installed.
    """
    with errors_as(ParamError, "Param loraRank needs peft", "Run pip install peft.", of=ImportError):
        from peft import LoraConfig, get_peft_model
    adapted: nn.Module = get_peft_model(
        model,
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"),
    )
    return adapted


def merged(decoder: Any) -> nn.Module:
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
