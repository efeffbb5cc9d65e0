"""Columns of NumPy values to tensors of the dtype that the model and the loss take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


def to_tensor(array: npt.NDArray[np.generic] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``array`` as a tensor of ``dtype`` on ``device``, copying only when it must."""
    if isinstance(array, Tensor):
        return array.to(device=device, dtype=dtype, non_blocking=True)
    # Arrow hands out read-only arrays, and a tensor over one could be written to.
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = np.require(array, requirements=["C", "W"])
    return torch.from_numpy(array).to(device=device, dtype=dtype, non_blocking=True)


def to_features(array: npt.NDArray[np.generic] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return features as the model takes them: as :func:`to_tensor`, and scalars of a floating dtype as ``(N, 1)``.

    A layer such as Linear would take ``(N,)`` for one row of N features; an embedding takes integers as ``(N,)``.
    """
    tensor = to_tensor(array, dtype, device)
    return tensor.unsqueeze(1) if tensor.ndim == 1 and dtype.is_floating_point else tensor


def parameter_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter; float32 for a module without one."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def candidate_dtypes(column_dtype: str, module: nn.Module) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a column may enter the model or the loss, the preferred one first.

    Floats become the parameters' dtype. Integers stay integers (int64) where the model takes them, as an
    embedding does, and become the parameters' dtype where it does not.
    """
    floating = parameter_dtype(module)
    if np.issubdtype(np.dtype(column_dtype), np.floating):
        return (floating,)
    return (torch.int64, floating)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return ``torch.float32`` for ``"float32"``.

    Raises:
        ValueError: if torch has no dtype of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype
