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
    """Load weights into a module, all but those of last layers for other classes, which stay as they are.

    A layer is a last one if it has an output for each class, here as in the weights: a width that happens to be the
    number of classes makes none.

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
    of_last = weights.get(f"{last}.weight")
    num_given = None if of_last is None or of_last.dim() == 0 else len(of_last)
    of_classes = {
        f"{layer}.{part}" for layer in _layers_of(module, num_outputs) for part in ("weight", "bias")
    }
    fitting, missing = {}, []
    for name, tensor in own.items():
        given = weights.get(name)
        if given is not None and given.shape == tensor.shape:
            fitting[name] = given
        elif given is None:
            is_needed = last is None or name.rpartition(".")[0] != last
            missing += [name] if is_needed else []
        elif name not in of_classes or given.shape != (num_given, *tensor.shape[1:]):
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
    # Its own state_dict tells the versions of layers, without which torchvision's mnasnet takes no weights.
    own.update(fitting)
    module.load_state_dict(own)


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
    return next(iter(reversed(_layers_of(module, num_outputs))), None)


def _layers_of(module: nn.Module, num_outputs: int) -> list[str]:
    """The names of linear layers and convolutions with so many outputs."""
    return [
        name
        for name, layer in module.named_modules()
        if (isinstance(layer, nn.Linear) and layer.out_features == num_outputs)
        or (isinstance(layer, nn.Conv2d) and layer.out_channels == num_outputs)
    ]
