"""``hvd.alltoall``: gives every rank of a process set its part of the rows of every rank's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Kind, Request
from sparkdl.horovod.torch.handles import run_later
from sparkdl.horovod.torch.operations.preparation import (
    TensorsRequest,
    as_buffer,
    as_bytes,
    bytes_per_row,
    check_tensors,
    describe,
    name_of,
    refuse_ranks_that_joined,
    refuse_scalars,
    run_with_gradients,
)
from sparkdl.horovod.torch.process_sets import ProcessSet, engine_of, global_process_set


class AlltoallRequest(TensorsRequest):
    """Exchanges rows into a new tensor. The ranks first exchange how many rows they send to each rank."""

    def __init__(
        self, name: str, tensor: torch.Tensor, splits: Sequence[int], received_on: torch.device
    ) -> None:
        """Make the request.

        Args:
            name: name under which the request is matched.
            tensor: rows for the first rank, then those for the second, ...; rows beyond all splits are not sent.
            splits: number of rows to send to each rank.
            received_on: device of the tensor with the numbers of received rows.
        """
        super().__init__(describe(Kind.ALLTOALL, name, [tensor]), [tensor], is_group=True)
        self._splits = list(splits)
        self._received_on = received_on

    def match(self, communicator: Communicator) -> None:
        """Gather a one and the splits from every rank; ranks that have joined contribute zeros."""
        self._gather(communicator, self._splits)

    def complete(self, communicator: Communicator) -> None:
        """Exchange the rows."""
        (tensor,) = self._tensors
        refuse_ranks_that_joined(Kind.ALLTOALL, self._given)
        refuse_scalars("ALLTOALL", [tensor])
        received = self._given[:, 1 + communicator.rank].tolist()
        if (route := self._route(communicator)) is not None:
            output, self._arrival = route.alltoall(tensor, self._splits, received, self._stream_point.follow)
        else:
            self._stream_point.wait()
            buffer = torch.empty((sum(received), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
            width = bytes_per_row(tensor)
            communicator.alltoall(
                as_bytes(as_buffer(tensor[: sum(self._splits)])),
                as_bytes(buffer),
                send_counts=[count * width for count in self._splits],
                receive_counts=[count * width for count in received],
                name=self.label,
            )
            output = buffer.to(tensor.device)
        # How many rows came from each rank.
        self._outputs = [output, torch.tensor(received, dtype=torch.int32, device=self._received_on)]


Splits = torch.Tensor | Sequence[int] | None


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank, and receive rows from every rank. The gradient is sent the opposite way.

    Args:
        tensor: rows for the first rank, then those for the second, ...
        splits: number of rows to send to each rank (int32); None to send equally many.
        name: name under which the ranks match the operation; numbered in the order of submission if None.
        process_set: ranks that take part.

    Returns:
        A new tensor of the rows received, in rank order; with ``splits`` also the number from each rank (int32).

    Raises:
        HorovodInternalError: on all ranks, if the tensors do not fit together, or a rank has joined.
        ValueError: if the splits do not fit the tensor or the process set.
    """
    shape = tensor.shape
    received_splits: Splits = None

    def pull_back(grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        grad, _ = alltoall(grads[0], splits=received_splits, process_set=process_set)
        if grad.shape != shape:  # rows that were sent to no rank
            grad = torch.cat([grad, grad.new_zeros((shape[0] - grad.shape[0], *shape[1:]))])
        return [grad]

    output, received_splits = run_with_gradients(
        [tensor], lambda sent: _request(sent[0], splits, name, process_set), pull_back
    )
    return output if splits is None else (output, received_splits)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`alltoall`, without gradients; ``synchronize`` returns the new tensor and the received splits."""
    return run_later(*_request(tensor, splits, name, process_set))


def _request(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
) -> tuple[Engine, Request[tuple[torch.Tensor, torch.Tensor]]]:
    check_tensors([tensor])
    engine = engine_of(process_set, "Alltoall")
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    world_size = engine.communicator.world_size
    # A tensor without dimensions is refused only once the ranks have met, so that none of them waits for this one.
    counts = _check_splits(splits, tensor.shape[0], world_size) if tensor.dim() else [0] * world_size
    return engine, AlltoallRequest(name_of(engine, "Alltoall", name), tensor, counts, device)


def _check_splits(splits: Splits, num_rows: int, world_size: int) -> list[int]:
    if splits is None:
        splits = []
    if not isinstance(splits, torch.Tensor):
        splits = torch.tensor(splits, dtype=torch.int32, device="cpu")
    if splits.dim() > 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    if splits.dtype != torch.int32:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    counts: list[int] = splits.tolist()
    if not counts:
        if num_rows % world_size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers."
            )
        return [num_rows // world_size] * world_size
    if len(counts) != world_size:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if sum(counts) > num_rows:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    if min(counts) < 0:
        raise ValueError(f"splits cannot be negative, got {counts}.")
    return counts
