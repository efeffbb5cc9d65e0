"""Giving every rank of a process set its part of the rows of every rank's tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Kind
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.requests.describing import describe, refuse_ranks_that_joined
from sparkdl.horovod.torch.requests.host_memory import (
    Arrival,
    as_buffer,
    as_bytes,
    bytes_per_row,
    refuse_scalars,
)


class AlltoallRequest(Request[tuple[torch.Tensor, torch.Tensor]]):
    """Exchanges rows into a new tensor. First the ranks tell each other how many rows they send to whom."""

    def __init__(
        self, name: str, tensor: torch.Tensor, splits: Sequence[int], received_on: torch.device
    ) -> None:
        """Make the request.

        Args:
            name: by which it is matched.
            tensor: the rows for the first rank, then those for the second, ...; what is beyond all splits stays.
            splits: how many rows go to each rank.
            received_on: the device on which the numbers of received rows are wanted.
        """
        super().__init__(describe(Kind.ALLTOALL, name, [tensor]))
        self._tensor = tensor
        self._splits = list(splits)
        self._received_on = received_on
        self._arrival = Arrival([tensor])
        self._splits_of_ranks = np.zeros((0, 0), np.int64)
        self._received: tuple[torch.Tensor, torch.Tensor] | None = None

    def match(self, communicator: Communicator) -> None:
        """Exchange the splits, after a one, which a rank that has joined does not give."""
        own = np.array([1, *self._splits])
        self._splits_of_ranks = np.zeros((communicator.world_size, own.size), np.int64)
        communicator.allgather(own, self._splits_of_ranks, name=self.label)

    def complete(self, communicator: Communicator) -> None:
        """Exchange the rows."""
        refuse_ranks_that_joined(Kind.ALLTOALL, self._splits_of_ranks)
        refuse_scalars("ALLTOALL", [self._tensor])
        self._arrival.wait()
        received = self._splits_of_ranks[:, 1 + communicator.rank].tolist()
        output = torch.empty((sum(received), *self._tensor.shape[1:]), dtype=self._tensor.dtype)
        width = bytes_per_row(self._tensor)
        communicator.alltoall(
            as_bytes(as_buffer(self._tensor[: sum(self._splits)])),
            as_bytes(output),
            send_counts=[count * width for count in self._splits],
            receive_counts=[count * width for count in received],
            name=self.label,
        )
        counts = torch.tensor(received, dtype=torch.int32, device=self._received_on)
        self._received = (output.to(self._tensor.device), counts)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The received rows, and how many came from each rank (int32)."""
        assert self._received is not None
        return self._received
