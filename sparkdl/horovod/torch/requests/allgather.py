"""Joining the ranks' tensors along their first dimension, in which alone they may differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Kind
from sparkdl.horovod.torch.engine.mismatches import refuse_join
from sparkdl.horovod.torch.engine.request import Request, Result
from sparkdl.horovod.torch.exceptions import HorovodInternalError
from sparkdl.horovod.torch.requests.describing import describe
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
        self._outputs = [
            self._gather(communicator, tensor, self._rows[:, 1 + position].tolist())
            for position, tensor in enumerate(self._tensors)
        ]

    def _gather(self, communicator: Communicator, tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
        gathered = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype)
        if gathered.numel():
            width = bytes_per_row(tensor)
            communicator.allgather(
                as_bytes(as_buffer(tensor)),
                as_bytes(gathered),
                counts=None if len(set(rows)) == 1 else [count * width for count in rows],
                name=self.label,
            )
        return gathered.to(tensor.device)


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


def refuse_ranks_that_joined(kind: Kind, given: np.ndarray[Any, Any]) -> None:
    """Refuse to go on if a row of ``given`` does not begin with the one that ranks with data give.

    Raises:
        HorovodInternalError: the same on all ranks.
    """
    joined = [rank for rank, first in enumerate(given[:, 0].tolist()) if not first]
    error = refuse_join(kind, joined)
    if error is not None:
        raise HorovodInternalError(error)
