"""Tensors as the buffers that a communicator takes: flat, contiguous, of an element type that it can reduce.

A tensor that already is such a buffer is passed on without a copy; any other is copied into a staging buffer first and,
if the collective writes to it, copied back afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparkdl.collective.buffers import DTYPES
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ELEMENT_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)
"""The element types that a communicator supports."""

FLOAT_DTYPES = frozenset(dtype for dtype in ELEMENT_DTYPES if dtype.is_floating_point)


PLAIN_OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
}
"""The operations of c10d that a communicator has, too, and its names for them."""

_BITWISE_OPS: dict[object, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


_EXPORTS_ADDRESS = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
"""Whether the native communicator can read a tensor's address by itself (torch 2.10 and later)."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A c10d ``ReduceOp`` in the communicator's terms.

    Attributes:
        op: communicator's name of the operation; None if the operation is bitwise.
        prescale: factor of every rank's input, applied first (``PREMUL_SUM``).
        bitwise: element-wise function of a bitwise operation, or None.
    """

    op: str | None
    prescale: float = 1.0
    bitwise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def reduction_of(reduce_op: Any) -> Reduction:
    """Translate a c10d ``ReduceOp``.

    Raises:
        ParamError: if the operation is not one that c10d documents.
    """
    kind, factor = reduce_op, 1.0
    if not isinstance(reduce_op, dist.ReduceOp.RedOpType):
        kind, factor = reduce_op.__getstate__()  # torch shows the factor only in the pickled state
    if kind in _BITWISE_OPS:
        return Reduction(op=None, bitwise=_BITWISE_OPS[kind])
    if kind == dist.ReduceOp.PREMUL_SUM:
        return Reduction(op="sum", prescale=float(factor))
    if kind not in PLAIN_OPS:
        raise ParamError(
            f"sparkdl cannot reduce with {kind}; use SUM, AVG, MIN, MAX, PRODUCT or a bitwise operation"
        )
    return Reduction(op=PLAIN_OPS[kind])


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order, one-dimensional: a view if it is contiguous, else a copy."""
    flat = tensor.detach()
    if not is_flat(flat):
        flat = flat.resolve_conj().resolve_neg().contiguous()
    elif flat.dim() == 1 and flat.stride(0) == 1:
        return flat
    # With a stride of 1: a contiguous tensor of at most one element may have any stride, as a column of a one-row
    # matrix has, and torch then refuses to view it as bytes.
    return flat.as_strided((flat.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in order, one-dimensional."""
    return flatten(tensor).view(torch.uint8)


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors in which a tensor keeps its elements, over the same memory; each can be viewed as bytes.

    These are the indices and values of a sparse tensor, the integers of a quantized one, and the tensors in a wrapper,
    such as this rank's part of a DTensor. Any other tensor is its only part.

    Raises:
        ParamError: if the memory of the tensor's layout cannot be accessed.
    """
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        parts = [
            getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]
        ]  # a DTensor's mesh is one, too
        return [piece for part in parts if isinstance(part, torch.Tensor) for piece in plain_parts(part)]
    if tensor.is_quantized:
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return [content.set_(tensor.untyped_storage())]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout != torch.strided:
        raise ParamError(
            f"sparkdl cannot send a tensor of layout {tensor.layout}. Convert it with to_dense() and back on each rank."
        )
    return [tensor]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the whole of a DTensor, collectively; return any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order, one-dimensional, in a type that a communicator moves: a view or a copy.

    Complex numbers become pairs, and types that the communicator does not support become bytes.
    """
    flat = flatten(tensor)
    if flat.dtype in ELEMENT_DTYPES:
        return flat
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat.view(torch.uint8)


def elements_per_element(tensor: torch.Tensor) -> int:
    """Number of elements that :func:`movable` makes of one element."""
    if tensor.dtype in ELEMENT_DTYPES:
        return 1
    return 2 if tensor.is_complex() else tensor.element_size()


def reducible(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The elements of a tensor, contiguous, in a type that the communicator reduces: a view or a copy.

    Raises:
        ParamError: if the communicator cannot reduce the tensor's type; complex tensors allow only ``sum`` and ``avg``.
    """
    if tensor.dtype in ELEMENT_DTYPES:
        return flatten(tensor)
    if tensor.is_complex() and op in ("sum", "avg"):
        return torch.view_as_real(flatten(tensor)).view(-1)
    raise ParamError(f"sparkdl cannot reduce {tensor.dtype} tensors with {op!r}; convert them first")


def export(tensor: torch.Tensor) -> Any:
    """The tensor as the type of array that a communicator accepts fastest, over the same memory."""
    return tensor if _EXPORTS_ADDRESS or tensor.dtype == torch.bfloat16 else tensor.numpy()


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the communicator can read and write this tensor in place."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def restore(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a buffer made by :func:`movable` or :func:`reducible` back to its tensor, unless it is a view of it."""
    if buffer.data_ptr() == tensor.data_ptr() and is_flat(tensor):
        return
    if buffer.dtype != tensor.dtype:
        buffer = buffer.view(tensor.dtype)
    target, source = tensor.detach(), buffer.view(tensor.shape)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: all elements along it are one
            target, source = target.narrow(dim, 0, 1), _single(source, dim)
    target.copy_(source)


def _single(values: torch.Tensor, dim: int) -> torch.Tensor:
    first = values.narrow(dim, 0, 1)
    if not torch.equal(as_bytes(first.expand_as(values)), as_bytes(values)):  # NaN equals itself
        raise ParamError(
            f"The result has different values for elements of an expanded tensor that share memory (dimension {dim} "
            f"of {tuple(values.shape)}). Pass a tensor with its own memory, such as tensor.contiguous()."
        )
    return first


def check_dtypes(name: str, *tensors: torch.Tensor) -> None:
    """Check that the tensors between which a rank copies data have the same dtype.

    Raises:
        ParamError: if they do not: the bytes of one type would be taken for values of the other.
    """
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if len(dtypes) > 1:
        raise ParamError(
            f"{name} copies values between tensors of one dtype, and these have {', '.join(map(str, dtypes))}. "
            "Make outputs of the dtype of the inputs."
        )


def rows_of_blocks(tensor: torch.Tensor, split_sizes: Sequence[int] | None, world_size: int) -> list[int]:
    """Number of rows of each rank's block of a tensor that an alltoall splits; equal if no split sizes are given.

    Raises:
        ParamError: if the sizes do not divide the rows among the ranks.
    """
    num_rows = tensor.shape[0]
    if not split_sizes:
        if num_rows % world_size:
            raise ParamError(f"alltoall cannot divide {num_rows} rows evenly among {world_size} ranks.")
        return [num_rows // world_size] * world_size
    if len(split_sizes) != world_size or sum(split_sizes) != num_rows:
        raise ParamError(
            f"alltoall split sizes {list(split_sizes)} do not divide {num_rows} rows among {world_size} ranks."
        )
    return list(split_sizes)
