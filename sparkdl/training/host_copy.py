"""Copies the state of a part of a fit to host memory, where training does not change it any more. On a *rank*.

What is copied is what :func:`torch.load` reads back with ``weights_only=True``, so that no checkpoint needs a pickle
that runs code. Anything else is refused when it is written, not when it is needed.
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
    """Return a copy on the CPU; tensors that are one tensor stay one.

    Args:
        value: numbers, strings, tensors, and dicts, lists, tuples and sets of them.
        name: of what is copied, for the error.

    Raises:
        CheckpointError: if it holds something else; it says where.
    """
    return _Copier().copy(value, name)


class _Copier:
    """Remembers which tensors it has copied."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if kind in _MAPPINGS:
            return kind({key: self.copy(value[key], f"{name}[{key!r}]") for key in value})
        if kind in _SEQUENCES:
            return kind(self.copy(each, f"{name}[{index}]") for index, each in enumerate(value))
        if isinstance(value, np.generic):
            return value.item()
        raise CheckpointError(
            f"No checkpoint can be written: {name} is a {kind.__module__}.{kind.__qualname__}, and a state may hold "
            "numbers, strings, tensors, and dicts, lists, tuples and sets of them. Change what its state_dict() "
            "returns, or leave checkpointDir away."
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
