"""``hvd.allgather``, ``hvd.grouped_allgather`` and ``hvd.sparse_allreduce_async``.

An allgather concatenates the ranks' tensors along the first dimension, the only one in which they may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Kind
from sparkdl.horovod.torch.handles import run_later, synchronize
from sparkdl.horovod.torch.names import Average
from sparkdl.horovod.torch.operations.allreduce import grouped_allreduce
from sparkdl.horovod.torch.operations.preparation import (
    TensorsRequest,
    as_buffer,
    as_bytes,
    bytes_per_row,
    check_tensors,
    describe,
    find_target,
    refuse_ranks_that_joined,
    refuse_scalars,
    run_with_gradients,
)
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set


class AllgatherRequest(TensorsRequest):
    """Gathers tensors into new ones. The ranks first exchange their numbers of rows."""

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], *, is_group: bool) -> None:
        super().__init__(describe(Kind.ALLGATHER, name, tensors), tensors, is_group=is_group)

    def match(self, communicator: Communicator) -> None:
        """Gather a one and the numbers of rows from every rank; ranks that have joined contribute zeros."""
        num_rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in self._tensors]
        self._gather(communicator, num_rows)

    def complete(self, communicator: Communicator) -> None:
        """Gather the rows."""
        refuse_ranks_that_joined(Kind.ALLGATHER, self._given)
        refuse_scalars("ALLGATHER", self._tensors)
        if (route := self._route(communicator)) is not None:
            rows = self._given[:, 1:].T.tolist()
            self._outputs, self._arrival = route.allgather(self._tensors, rows, self._stream_point.follow)
            return
        self._stream_point.wait()
        gathered = [
            torch.empty((int(rows.sum()), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
            for tensor, rows in zip(self._tensors, self._given[:, 1:].T, strict=True)
        ]
        some = [position for position, joined in enumerate(gathered) if joined.numel()]
        arrays = [as_bytes(as_buffer(self._tensors[position])) for position in some]
        outs = [as_bytes(gathered[position]) for position in some]
        counts = [
            (self._given[:, 1 + position] * bytes_per_row(self._tensors[position])).tolist()
            for position in some
        ]
        if len(some) == 1:
            communicator.allgather(arrays[0], outs[0], counts=counts[0], name=self.label)
        elif some:
            communicator.allgather_group(arrays, outs, counts=counts, name=self.label)
        self._outputs = [
            joined.to(tensor.device) for joined, tensor in zip(gathered, self._tensors, strict=True)
        ]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, the only one in which they may differ.

    The gradient is the average over the ranks of their gradients of this rank's rows, as in Horovod.

    Args:
        tensor: tensor of at least one dimension.
        name: name under which the ranks match the operation; numbered in the order of submission if None.
        process_set: ranks that take part.

    Returns:
        A new tensor of shape ``(sum of first dimensions, *rest)``.

    Raises:
        HorovodInternalError: on all ranks, if the tensors do not fit together, or a rank has joined.
    """
    (gathered,) = _run([tensor], name, process_set, is_group=False)
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`allgather`, without gradients; ``synchronize`` returns the new tensor."""
    return run_later(*_request([tensor], name, process_set))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """:func:`allgather` of several tensors as one operation."""
    return _run(tensors, name, process_set, is_group=True)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`, without gradients; ``synchronize`` returns a tuple of new tensors."""
    return run_later(*_request(tensors, name, process_set, is_group=True))


def _run(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, *, is_group: bool
) -> tuple[torch.Tensor, ...]:
    num_rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]

    def pull_back(grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        averages = grouped_allreduce(grads, op=Average, process_set=process_set)
        rows_of_ranks = allgather(torch.tensor([num_rows], device="cpu"), process_set=process_set)
        starts = rows_of_ranks[: process_set.rank()].sum(0).tolist()
        return [
            average.narrow(0, start, rows)
            for average, start, rows in zip(averages, starts, num_rows, strict=True)
        ]

    return run_with_gradients(
        tensors, lambda sent: _request(sent, name, process_set, is_group=is_group), pull_back
    )


def _request(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, *, is_group: bool = False
) -> tuple[Engine, TensorsRequest]:
    check_tensors(tensors)
    engine, full_name = find_target(process_set, "Grouped_allgather" if is_group else "Allgather", name)
    return engine, AllgatherRequest(full_name, list(tensors), is_group=is_group)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to add up a sparse tensor over the ranks, by gathering the entries of all ranks.

    Args:
        tensor: sparse (COO) tensor of the same shape and dtype on every rank; the number of entries may differ.
        name: name under which the ranks match the operation.
        op: ``Average`` for the average; any other value for the sum.
        process_set: ranks that take part.

    Returns:
        A function that waits for the result and returns it, a new sparse tensor that is not coalesced. The function
        raises ``HorovodInternalError`` if the operation failed.
    """
    entries = [tensor._indices().t().contiguous(), tensor._values()]
    handle = grouped_allgather_async(entries, name=f"{name}.sparse", process_set=process_set)

    def wait() -> torch.Tensor:
        indices, values = synchronize(handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    return wait
