"""Tensors as the buffers that a communicator takes: flat, contiguous, of an element type that it can reduce.

Runs on the *rank*. A tensor that already is such a buffer is passed on as it lies; any other is copied into a
staging buffer first and, where the collective writes to it, copied back afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable

REDUCIBLE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8}
)

# Element types that the communicator does not add are added in the next wider one. Truncating the wide sum
# gives what wrapping arithmetic in the narrow type would have given.
_WIDER_DTYPE = {
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}

_NATIVE_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.PREMUL_SUM: "sum",
}
_BITWISE_OPS: dict[object, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A c10d ``ReduceOp`` in the communicator's terms.

    Attributes:
        op: the communicator's name of the operation, or None where the operation is bitwise.
        factor: what every rank multiplies its input by first (``PREMUL_SUM``), or None.
        bitwise: the element-wise function of a bitwise operation, or None.
    """

    op: str | None
    factor: float | torch.Tensor | None = None
    bitwise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def reduction_of(reduce_op: dist.ReduceOp) -> Reduction:
    """Translate a c10d ``ReduceOp``.

    Raises:
        ParamError: if the operation is none that c10d documents.
    """
    kind, factor = _parts(reduce_op)
    if kind in _BITWISE_OPS:
        return Reduction(op=None, bitwise=_BITWISE_OPS[kind])
    if kind not in _NATIVE_OPS:
        raise ParamError(
            f"sparkdl cannot reduce with {kind}; use SUM, AVG, MIN, MAX, PRODUCT or a bitwise operation"
        )
    return Reduction(op=_NATIVE_OPS[kind], factor=factor)


def _parts(reduce_op: Any) -> tuple[Any, Any]:
    """The kind of an operation and its factor, which torch shows in the operation's pickled state alone."""
    if isinstance(reduce_op, dist.ReduceOp.RedOpType):
        return reduce_op, None
    kind, factor = reduce_op.__getstate__()
    return kind, factor


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order, one-dimensional: a view where it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in order, one-dimensional: how any element type is moved without being read."""
    return flatten(tensor).view(torch.uint8)


def export(tensor: torch.Tensor) -> Any:
    """The tensor as the array that a communicator takes up fastest, over the same memory; it keeps the memory."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def is_flat(tensor: torch.Tensor) -> bool:
    """The communicator can read and write this tensor where it lies."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def widen(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The elements of a tensor, contiguous, in a type that the communicator reduces; a view where it can be.

    Raises:
        ParamError: if no such type stands for the tensor's, or if its order is undefined for ``op``.
    """
    if tensor.dtype in REDUCIBLE_DTYPES and is_flat(tensor):
        return tensor.detach() if tensor.requires_grad else tensor
    flat = flatten(tensor.resolve_conj().resolve_neg())
    if flat.dtype in REDUCIBLE_DTYPES:
        return flat
    if flat.is_complex() and op in ("sum", "avg"):
        return flatten(torch.view_as_real(flat))
    if flat.dtype in _WIDER_DTYPE:
        return flat.to(_WIDER_DTYPE[flat.dtype])
    raise ParamError(f"sparkdl cannot reduce {tensor.dtype} tensors with {op!r}; convert them first")


def restore(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write back what :func:`widen` made of a tensor, now reduced; a view needs no writing back."""
    if buffer.data_ptr() == tensor.data_ptr() and is_flat(tensor):
        return
    if tensor.is_complex():
        buffer = torch.view_as_complex(buffer.view(-1, 2))
    tensor.detach().copy_(buffer.view(tensor.shape))
