"""The values that a checkpoint may hold besides the tensors of a model: copied to host memory, without code.

They consist of types that :func:`torch.load` reads with ``weights_only=True``, so that no checkpoint needs a pickle
that runs code. Other types are refused when the checkpoint is written, not when it is read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

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
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_tensor(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or not tensor.numel():
            return tensor.to("cpu", copy=True)
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = (*place, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in copies:
            copies[key] = tensor.to("cpu", copy=True)
        return copies[key]

    return check_values(value, name, copy_tensor)


def check_values(
    value: Any, name: str, copy_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Any:
    """Check a value as :func:`copy_to_host` does, and return it with its containers copied.

    ``copy_tensor`` is applied to each tensor; by default the tensor itself is kept.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor) and not hasattr(value, "full_tensor"):
        return copy_tensor(value.detach())
    if kind in _MAPPINGS:
        return kind({key: check_values(value[key], f"{name}[{key!r}]", copy_tensor) for key in value})
    if kind in _SEQUENCES:
        return kind(check_values(item, f"{name}[{index}]", copy_tensor) for index, item in enumerate(value))
    if isinstance(value, np.generic):
        return value.item()
    raise CheckpointError(
        f"No checkpoint can be written: {name} is a {kind.__module__}.{kind.__qualname__}, and a state may hold "
        "numbers, strings, tensors, and dicts, lists, tuples and sets of them. Leave it out, or change what its "
        "state_dict() returns."
    )
