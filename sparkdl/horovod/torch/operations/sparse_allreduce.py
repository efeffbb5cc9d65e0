"""``hvd.sparse_allreduce_async``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparkdl.horovod.torch.handles import synchronize
from sparkdl.horovod.torch.operations.allgather import grouped_allgather_async
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.torch.reduce_ops import Average


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to add up a sparse tensor over the ranks, by gathering the entries of all.

    Args:
        tensor: sparse (COO), of the same shape and dtype on every rank; the number of entries may differ.
        name: by which the ranks match it.
        op: ``Average``; otherwise the sum is taken.
        process_set: the ranks that take part.

    Returns:
        What to call for the result, a new sparse tensor that is not coalesced. It raises
        ``HorovodInternalError`` if the operation failed.
    """
    entries = [tensor._indices().t().contiguous(), tensor._values()]
    handle = grouped_allgather_async(entries, name=f"{name}.sparse", process_set=process_set)

    def wait() -> torch.Tensor:
        indices, values = synchronize(handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    return wait
