"""allreduce of sparse tensors, as the gradients of ``nn.Embedding(sparse=True)`` are. Runs on the *rank*.

The ranks gather each other's entries, as Gloo does, rather than reduce what is mostly zeros. How many entries there are
is known only once they have been asked: such an allreduce is complete when its call returns, ``asyncOp`` or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import elements_per_element, export, movable

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.torch.buffers import Reduction


def allreduce_sparse(
    communicator: Communicator, tensor: torch.Tensor, reduction: Reduction, timeout_s: float
) -> None:
    """Add up a sparse tensor over the ranks, in place; every rank ends with the same entries, coalesced.

    Args:
        communicator: of the ranks.
        tensor: of layout ``torch.sparse_coo``, with the same shape, dtype and number of sparse dimensions everywhere.
        reduction: a sum or an average.
        timeout_s: deadline of each of the operations.

    Raises:
        ParamError: if the layout is another one, or the reduction.
        MismatchError: on every rank, if they do not all have such a tensor.
    """
    if tensor.layout is not torch.sparse_coo or reduction.op not in ("sum", "avg"):
        raise ParamError(
            f"sparkdl reduces sparse tensors of layout torch.sparse_coo by SUM and AVG, got {tensor.layout} by "
            f"{reduction.op or 'a bitwise operation'}; convert it with to_dense() first"
        )
    own = tensor.detach().coalesce()
    shape = tuple(tensor.shape)
    what = f"sparse {own.dtype} of shape {shape}, {own.sparse_dim()} dimensions sparse"
    counts = torch.zeros(communicator.world_size, dtype=torch.int64)
    communicator.allgather(
        export(torch.tensor([own.indices().shape[1]])), export(counts), name=what, timeout_s=timeout_s
    )
    indices = _gather(communicator, own.indices().t(), counts.tolist(), what, timeout_s)
    values = _gather(communicator, own.values(), counts.tolist(), what, timeout_s)
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()  # so that sums are rounded once
    if reduction.prescale != 1.0:
        values = values * reduction.prescale
    total = torch.sparse_coo_tensor(indices.t(), values, shape).coalesce()
    if reduction.op == "avg":
        is_integer = not (values.is_floating_point() or values.is_complex())
        total.values().div_(communicator.world_size, rounding_mode="trunc" if is_integer else None)
    with torch.no_grad():  # a detached one would not see that there are other entries
        tensor.copy_(total)


def _gather(
    communicator: Communicator, rows: torch.Tensor, counts: list[int], what: str, timeout_s: float
) -> torch.Tensor:
    """The rows of all ranks, of which each has so many."""
    gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
    width = gathered[:1].numel() * elements_per_element(rows)
    communicator.allgather(
        export(movable(rows)),
        export(movable(gathered)),
        counts=[count * width for count in counts],
        name=what,
        timeout_s=timeout_s,
    )
    return gathered
