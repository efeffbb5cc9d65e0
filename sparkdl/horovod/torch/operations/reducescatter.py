"""``hvd.reducescatter`` and ``hvd.grouped_reducescatter``.

They reduce tensors over the ranks of a process set and give every rank its rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Kind
from sparkdl.horovod.torch.handles import run_later
from sparkdl.horovod.torch.names import Average, HorovodInternalError, Sum
from sparkdl.horovod.torch.operations import device_route
from sparkdl.horovod.torch.operations.allgather import grouped_allgather
from sparkdl.horovod.torch.operations.preparation import (
    ReductionRequest,
    as_buffer,
    check_reducible,
    find_target,
    refuse_ranks_that_joined,
    run_with_gradients,
    split_rows,
)
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.torch.buffers import export


class ReducescatterRequest(ReductionRequest):
    """Reduces tensors into new ones with this rank's rows. The ranks first check that none has joined.

    Without this check the communicator would reduce the zeros of ranks that have joined.
    """

    kind = Kind.REDUCESCATTER

    def complete(self, communicator: Communicator) -> None:
        """Reduce the tensors."""
        refuse_ranks_that_joined(Kind.REDUCESCATTER, self._given)
        rows = [split_rows(tensor.shape[0], communicator.world_size) for tensor in self._tensors]
        route = self._route(communicator) if device_route.can_reduce(self.description) else None
        if route is not None:
            follow = self._stream_point.follow
            self._outputs, self._arrival = route.reducescatter(self._tensors, rows, self.description, follow)
            return
        self._stream_point.wait()
        reduced = [
            torch.empty((of_ranks[communicator.rank], *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
            for tensor, of_ranks in zip(self._tensors, rows, strict=True)
        ]
        for dtype in dict.fromkeys(tensor.dtype for tensor in self._tensors):
            self._reduce(
                communicator,
                [
                    (as_buffer(tensor), output, [count * tensor[:1].numel() for count in of_ranks])
                    for tensor, output, of_ranks in zip(self._tensors, reduced, rows, strict=True)
                    if tensor.dtype == dtype
                ],
            )
        self._outputs = [
            output.to(tensor.device) for output, tensor in zip(reduced, self._tensors, strict=True)
        ]

    def _reduce(
        self, communicator: Communicator, group: Sequence[tuple[torch.Tensor, torch.Tensor, list[int]]]
    ) -> None:
        """Reduce tensors of one dtype; ``group`` has tensors, their outputs, and the ranks' numbers of elements."""
        arrays = [export(tensor) for tensor, _, _ in group]
        outs = [export(output) for _, output, _ in group]
        counts = [counts for _, _, counts in group]
        if len(group) == 1:
            communicator.reduce_scatter(arrays[0], outs[0], counts=counts[0], **self._options())
        else:
            communicator.reduce_scatter_group(arrays, outs, counts=counts, **self._options())


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over the ranks and give each rank its rows of the result.

    Args:
        tensor: tensor of at least one dimension, of the same shape and dtype on every rank.
        name: name under which the ranks match the operation; numbered in the order of submission if None.
        compression: compressor for the tensor that is sent.
        op: ``Average`` or ``Sum``.
        process_set: ranks that take part.
        prescale_factor: factor applied to the input before the reduction.
        postscale_factor: factor applied to the result.

    Returns:
        A new tensor with this rank's rows. The rows are divided evenly; the first ranks get one more of a remainder.

    Raises:
        HorovodInternalError: on all ranks, if they disagree about the tensor, the operation or the factors.
        ValueError: if the tensor is not supported, or this rank is not in the process set.
    """
    compressed, ctx = compression.compress(tensor)
    options = (op, process_set, prescale_factor, postscale_factor)
    (reduced,) = _run([compressed], name, options, is_group=False)
    return compression.decompress(reduced, ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`reducescatter`, without gradients; ``synchronize`` returns the new tensor."""
    return run_later(*_request([tensor], name, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors as one operation."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    reduced = _run(sent, name, (op, process_set, prescale_factor, postscale_factor), is_group=True)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`grouped_reducescatter`, without gradients; ``synchronize`` returns a tuple of new tensors."""
    options = (op, process_set, prescale_factor, postscale_factor)
    return run_later(*_request(tensors, name, *options, is_group=True))


def _run(
    tensors: Sequence[torch.Tensor], name: str | None, options: tuple[Any, ...], *, is_group: bool
) -> tuple[torch.Tensor, ...]:
    op, process_set, prescale, postscale = options

    def pull_back(grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        return grouped_allgather([grad * factor for grad in grads], process_set=process_set)

    return run_with_gradients(
        tensors, lambda sent: _request(sent, name, *options, is_group=is_group), pull_back
    )


def _request(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    is_group: bool = False,
) -> tuple[Engine, ReductionRequest]:
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("Reducescatter does not support scalar inputs")
    check_reducible(tensors, op)
    operation = "Grouped_reducescatter" if is_group else "Reducescatter"
    engine, full_name = find_target(process_set, operation, name)
    return engine, ReducescatterRequest(
        full_name, list(tensors), op=op, prescale=prescale, postscale=postscale, is_group=is_group
    )
