"""Objects of a fit in words, so that two fits can be told apart by them. Runs on the *driver* and on a *rank*.

Two objects that do the same are described alike in any process. The converse does not hold: of a function its name is
told, and what :func:`functools.partial` binds, not what it does.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.optim import Optimizer

_LONGEST = 300
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def described(value: object) -> str | None:
    """Return what an object is, in words; None for None.

    A module by its class and options, a frozen dataclass by its fields, a partial function by what it binds, anything
    else that is no plain value by its name or that of its class. What would be long is cut, and told by a checksum.
    """
    return None if value is None else _described(value)


def described_modules(module: nn.Module) -> dict[str, str]:
    """Return by the name of each module in a module its class and options.

    The options of modules of torch and metrics of torchmetrics are their plain attributes, as the share that a Dropout
    drops; those of other modules what their ``extra_repr`` tells, as their attributes may change in training.
    """
    return {name: f"{type(part).__qualname__}({_options(part)})" for name, part in module.named_modules()}


def described_optimizer(optimizer: Optimizer, module: nn.Module) -> dict[str, str]:
    """Return the options of an optimizer for each of its groups of parameters, and which parameters those are."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [
        _listed({name: value for name, value in sorted(group.items()) if _is_option(value)})
        for group in optimizer.param_groups
    ]
    members = [
        [names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups
    ]
    return {
        "optimizer": f"{type(optimizer).__name__}({'; '.join(groups)})",
        "parameters of the optimizer": checksum(repr(members).encode()),
    }


def checksum(content: bytes) -> str:
    """Return the first 16 digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def is_plain(value: object) -> bool:
    """Whether a value is one that JSON holds, or a tuple or list of such."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _described(value: object) -> str:
    if is_plain(value):
        return _short(repr(value))
    if isinstance(value, functools.partial):
        bound = [*map(_described, value.args), *_pairs(value.keywords)]
        return f"{_described(value.func)}({', '.join(bound)})"
    if isinstance(value, Tensor):
        numbers = value.detach().to("cpu", torch.float64).numpy()
        return f"{tuple(value.shape)} {checksum(numbers.tobytes())}"
    if isinstance(value, nn.Module):
        parts = [f"{name}: {of}" if name else of for name, of in described_modules(value).items()]
        tensors = _pairs(_constants(value))
        return _short(", ".join([*parts, *tensors]))
    if _is_frozen(value):
        names = (field.name for field in dataclasses.fields(cast("Any", value)))
        fields = {name: getattr(value, name) for name in names}
        return f"{type(value).__qualname__}({_listed(fields)})"
    if isinstance(value, Mapping):
        return _short(f"{{{_listed({str(name): each for name, each in value.items()})}}}")
    if isinstance(value, tuple | list):
        return _short(f"[{', '.join(map(_described, value))}]")
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _options(module: nn.Module) -> str:
    if not _is_of(module, "torch.nn.", "torchmetrics."):
        return _short(_ADDRESS.sub("", module.extra_repr()))
    plain = {
        name: value
        for name, value in sorted(vars(module).items())
        if name != "training" and not name.startswith("_") and value is not None and is_plain(value)
    }
    return _listed(plain)


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a loss of torch, as weights of classes; those of other modules may be counters."""
    return dict(module.named_buffers()) if _is_of(module, "torch.nn.") else {}


def _is_of(module: nn.Module, *packages: str) -> bool:
    return type(module).__module__.startswith(packages)


def _is_frozen(value: object) -> bool:
    """Whether a value is of a dataclass whose fields stay what they are."""
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and bool(params.frozen)


def _is_option(value: object) -> bool:
    return isinstance(value, bool | int | float | str | tuple) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(_pairs(values))


def _pairs(values: Mapping[str, Any]) -> Iterable[str]:
    return [f"{name}={_described(value)}" for name, value in values.items()]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({checksum(text.encode())})"
