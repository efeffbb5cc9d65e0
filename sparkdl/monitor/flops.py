"""Floating point operations of a training step, counted once, and the most that a device can do in a second.

The counts are those of torch's own formulas (:mod:`torch.utils.flop_counter`): products of matrices, convolutions and
attention, forward and backward, each multiplication and addition as one operation. Operations that are computed again,
as by activation checkpointing, are counted again.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from sparkdl.gpu_data_sheets import data_sheet_of

aten = torch.ops.aten


_ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, query, key, value, *_, **__: (
        sdpa_backward_flop_count(gradient, query, key, value)
    ),
}
"""Attention on CPU, for which torch has no formula."""


class _Count(TorchDispatchMode):
    """Adds up the operations of this rank's tensors.

    Unlike ``FlopCounterMode`` it looks into tensor subclasses, so that a DTensor counts with the part that this rank
    computes. It does not count by module.

    Attributes:
        flops: number of operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_ON_CPU).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:  # a DTensor plans how its parts are laid out; nothing is computed
            return func(*args, **(kwargs or {}))
        # A subclass with operators of its own then calls operators on its parts. Others, such as the parameters of lazy
        # layers, are plain tensors here.
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


class FlopCount:
    """Counts the operations between :meth:`begin` and :meth:`end`, which are called on one thread.

    A compiled module runs without its compiled code meanwhile, whose operations could not be counted.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._count: _Count | None = None

    def begin(self) -> None:
        """Begin to count."""
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._count = self._stack.enter_context(_Count())

    def end(self) -> int:
        """End, and return the number of operations; 0 if it has not begun."""
        count, self._count = self._count, None
        self._stack.close()
        return 0 if count is None else count.flops


_SIZE = 512
_NUM_PRODUCTS = 8


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the most operations per second of a device; None if they are not known.

    That of a GPU is in its data sheet. That of a CPU is what products of matrices reach on this rank's threads.

    Args:
        device: device on which a rank computes.
        precision: ``"float32"``, or that of the computations: ``"bfloat16"``, ``"float16"`` or ``"float8"``.
    """
    if device.type == "cpu":
        return _measure_products(torch.float32 if precision == "float32" else torch.bfloat16)
    sheet = data_sheet_of(torch.cuda.get_device_name(device))
    if sheet is None:
        return None
    if precision == "float8":  # twice that of half precision, on GPUs that have it
        return 2 * sheet.half
    return sheet.single if precision == "float32" else sheet.half


def _measure_products(dtype: torch.dtype) -> float:
    left, right = (torch.full((_SIZE, _SIZE), 0.5, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    best_s = float("inf")
    with torch.no_grad():
        for _ in range(_NUM_PRODUCTS):
            began = time.perf_counter()
            torch.mm(left, right, out=out)
            best_s = min(best_s, time.perf_counter() - began)
    return 2 * _SIZE**3 / best_s
