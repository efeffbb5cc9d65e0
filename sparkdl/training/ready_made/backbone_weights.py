"""Weights of a file for a backbone, whose last layer is new. Runs on the *driver*."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sparkdl.errors import ParamError

_WRAPPED = ("state_dict", "model")
"""Under which names training scripts often keep the weights among other things."""


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the tensors of a local file by name: of safetensors, or a ``state_dict`` that ``torch.save`` wrote.

    Nothing but tensors is unpickled.

    Raises:
        ParamError: if there is no such file, or it holds something else.
    """
    if not Path(path).is_file():
        raise ParamError(f"Param backboneWeights is {path!r}, and there is no such file on the driver.")
    try:
        found: Any = (
            load_file(path)
            if path.endswith(".safetensors")
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:
        raise ParamError(
            f"Param backboneWeights is {path!r}, which cannot be read: {type(error).__name__}: {error}. It takes a "
            "file of safetensors, or one that torch.save(model.state_dict(), path) wrote."
        ) from error
    for name in _WRAPPED:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()):
        raise ParamError(
            f"Param backboneWeights is {path!r}, which does not hold tensors by name. Write it with "
            "torch.save(model.state_dict(), path)."
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def load_fitting(module: nn.Module, weights: Mapping[str, Tensor], *, num_outputs: int, path: str) -> None:
    """Load weights into a module, all but those of layers for other classes, which stay as they are.

    Args:
        module: to load them into.
        weights: by name.
        num_outputs: classes that the module tells apart. Its last layer may be missing from the weights.
        path: of the weights, for errors.

    Raises:
        ParamError: if other tensors are missing, left over or of another shape.
    """
    own = module.state_dict()
    last = last_layer(module, num_outputs)
    fitting, missing = {}, []
    for name, tensor in own.items():
        given = weights.get(name)
        if given is not None and given.shape == tensor.shape:
            fitting[name] = given
        elif given is None:
            is_needed = last is None or name.rpartition(".")[0] != last
            missing += [name] if is_needed else []
        elif tensor.shape[:1] != (num_outputs,) or given.shape[1:] != tensor.shape[1:]:
            missing.append(name)
    spare = [name for name in weights if name not in own]
    if missing or spare:
        told = [
            f"{what}: {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
            for what, names in (("missing or of another shape", missing), ("left over", spare))
            if names
        ]
        raise ParamError(
            f"Param backboneWeights is {path!r}, which holds the weights of another network ({'; '.join(told)}). Name "
            "the backbone that they belong to."
        )
    module.load_state_dict(fitting, strict=False)


def with_outputs(module: nn.Module, num_outputs: int) -> nn.Module:
    """Replace the last layer of a network for the 1000 classes of ImageNet by a new one, and return the network.

    Raises:
        ParamError: if it has no such layer.
    """
    name = last_layer(module, 1000)
    if name is None:
        raise ParamError(
            "Param backbone names a network without a last layer for the 1000 classes of ImageNet."
        )
    layer: Any = module.get_submodule(name)
    has_bias = layer.bias is not None
    new: nn.Module
    if isinstance(layer, nn.Linear):
        new = nn.Linear(layer.in_features, num_outputs, bias=has_bias)
    else:
        new = nn.Conv2d(
            layer.in_channels, num_outputs, layer.kernel_size, layer.stride, layer.padding, bias=has_bias
        )
    parent, _, place = name.rpartition(".")
    setattr(module.get_submodule(parent), place, new)
    return module


def last_layer(module: nn.Module, num_outputs: int) -> str | None:
    """Return the name of the last linear layer or convolution with so many outputs; None where there is none."""
    found = None
    for name, layer in module.named_modules():
        outputs = getattr(layer, "out_features", None) or getattr(layer, "out_channels", None)
        if isinstance(layer, nn.Linear | nn.Conv2d) and outputs == num_outputs:
            found = name
    return found
