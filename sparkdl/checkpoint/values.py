"""The values that a checkpoint may hold besides the tensors of a model: copied to host memory, without code.

They consist of types that :func:`torch.load` reads with ``weights_only=True``, so that no checkpoint needs a pickle
that runs code. Other types are refused when the checkpoint is written, not when it is read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set)


def copy_to_host(value: Any, name: str) -> Any:
    """Return a copy on the CPU; references to the same tensor stay references to one copy.

    Args:
        value: numbers, strings, tensors other than DTensors, and plain dicts, lists, tuples and sets of them.
        name: name of the value, used in error messages.

    Raises:
        CheckpointError: if the value holds other types; the message says where.
    """
    return _Copier().copy(value, name)


def check_values(value: Any, name: str) -> Any:
    """Return a copy with the same tensors, which may be on any device; see :func:`copy_to_host`."""
    return _Copier(copies_tensors=False).copy(value, name)


class _Copier:
    """Copies values, and each tensor only once, or not at all."""

    def __init__(self, *, copies_tensors: bool = True) -> None:
        self._copies_tensors = copies_tensors
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor) and not hasattr(value, "full_tensor"):
            return self._copy_tensor(value) if self._copies_tensors else value.detach()
        if kind in _MAPPINGS:
            return kind({key: self.copy(value[key], f"{name}[{key!r}]") for key in value})
        if kind in _SEQUENCES:
            return kind(self.copy(item, f"{name}[{index}]") for index, item in enumerate(value))
        if isinstance(value, np.generic):
            return value.item()
        raise CheckpointError(
            f"No checkpoint can be written: {name} is a {kind.__module__}.{kind.__qualname__}, and a state may hold "
            "numbers, strings, tensors, and dicts, lists, tuples and sets of them. Leave it out, or change what its "
            "state_dict() returns."
        )

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        key = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if key not in self._copies or not tensor.numel():
            self._copies[key] = tensor.to("cpu", copy=True)
        return self._copies[key]
