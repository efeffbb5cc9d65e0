"""Joining the ranks' tensors along their first dimension, in which alone they may differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Kind
from sparkdl.horovod.torch.engine.request import Request, Result
from sparkdl.horovod.torch.requests.describing import describe, refuse_ranks_that_joined
from sparkdl.horovod.torch.requests.host_memory import (
    Arrival,
    as_buffer,
    as_bytes,
    bytes_per_row,
    refuse_scalars,
)


class AllgatherRequest(Request[Result]):
    """Gathers tensors into new ones. First the ranks tell each other their numbers of rows."""

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(describe(Kind.ALLGATHER, name, tensors))
        self._tensors = tensors
        self._arrival = Arrival(tensors)
        self._rows = np.zeros((0, 0), np.int64)
        self._outputs: list[torch.Tensor] = []

    def match(self, communicator: Communicator) -> None:
        """Exchange the numbers of rows, after a one, which a rank that has joined does not give."""
        own = np.array([1, *(tensor.shape[0] if tensor.dim() else 0 for tensor in self._tensors)])
        self._rows = np.zeros((communicator.world_size, own.size), np.int64)
        communicator.allgather(own, self._rows, name=self.label)

    def complete(self, communicator: Communicator) -> None:
        """Gather the rows."""
        refuse_ranks_that_joined(Kind.ALLGATHER, self._rows)
        refuse_scalars("ALLGATHER", self._tensors)
        self._arrival.wait()
        gathered = [
            torch.empty((int(rows.sum()), *tensor.shape[1:]), dtype=tensor.dtype)
            for tensor, rows in zip(self._tensors, self._rows[:, 1:].T, strict=True)
        ]
        some = [position for position, whole in enumerate(gathered) if whole.numel()]
        arrays = [as_bytes(as_buffer(self._tensors[position])) for position in some]
        outs = [as_bytes(gathered[position]) for position in some]
        counts = [
            (self._rows[:, 1 + position] * bytes_per_row(self._tensors[position])).tolist()
            for position in some
        ]
        if len(some) == 1:
            communicator.allgather(arrays[0], outs[0], counts=counts[0], name=self.label)
        elif some:
            communicator.allgather_group(arrays, outs, counts=counts, name=self.label)
        self._outputs = [
            whole.to(tensor.device) for whole, tensor in zip(gathered, self._tensors, strict=True)
        ]


class SingleAllgatherRequest(AllgatherRequest[torch.Tensor]):
    """Gathers one tensor."""

    def result(self) -> torch.Tensor:
        """The gathered tensor."""
        return self._outputs[0]


class GroupedAllgatherRequest(AllgatherRequest[tuple[torch.Tensor, ...]]):
    """Gathers several tensors."""

    def result(self) -> tuple[torch.Tensor, ...]:
        """The gathered tensors."""
        return tuple(self._outputs)
