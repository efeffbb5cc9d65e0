"""Reducing tensors over the ranks of a process set and giving every rank its rows of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Kind
from sparkdl.horovod.torch.engine.request import Request, Result
from sparkdl.horovod.torch.reduce_ops import name_of
from sparkdl.horovod.torch.requests.describing import describe, refuse_ranks_that_joined
from sparkdl.horovod.torch.requests.host_memory import Arrival, as_buffer, split_rows
from sparkdl.torch.buffers import export


class ReducescatterRequest(Request[Result]):
    """Reduces tensors into new ones with this rank's rows. First the ranks tell each other that none has joined."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        *,
        op: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        super().__init__(
            describe(Kind.REDUCESCATTER, name, tensors, op=op, prescale=prescale, postscale=postscale)
        )
        self._tensors = tensors
        self._arrival = Arrival(tensors)
        self._given = np.zeros((0, 0), np.int64)
        self._outputs: list[torch.Tensor] = []

    def match(self, communicator: Communicator) -> None:
        """Exchange a one, which a rank that has joined does not give: a communicator would reduce its zeros."""
        self._given = np.zeros((communicator.world_size, 1), np.int64)
        communicator.allgather(np.array([1]), self._given, name=self.label)

    def complete(self, communicator: Communicator) -> None:
        """Reduce the tensors."""
        refuse_ranks_that_joined(Kind.REDUCESCATTER, self._given)
        self._arrival.wait()
        rows = [split_rows(tensor.shape[0], communicator.world_size) for tensor in self._tensors]
        reduced = [
            torch.empty((of_ranks[communicator.rank], *tensor.shape[1:]), dtype=tensor.dtype)
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
        """Reduce tensors of one dtype into outputs, by the numbers of elements that the ranks get."""
        arrays = [export(tensor) for tensor, _, _ in group]
        outs = [export(output) for _, output, _ in group]
        counts = [counts for _, _, counts in group]
        options: dict[str, Any] = {
            "op": name_of(self.description.op),
            "prescale": self.description.prescale,
            "postscale": self.description.postscale,
            "name": self.label,
        }
        if len(group) == 1:
            communicator.reduce_scatter(arrays[0], outs[0], counts=counts[0], **options)
        else:
            communicator.reduce_scatter_group(arrays, outs, counts=counts, **options)


class SingleReducescatterRequest(ReducescatterRequest[torch.Tensor]):
    """Reduces one tensor."""

    def result(self) -> torch.Tensor:
        """This rank's rows of the reduced tensor."""
        return self._outputs[0]


class GroupedReducescatterRequest(ReducescatterRequest[tuple[torch.Tensor, ...]]):
    """Reduces several tensors."""

    def result(self) -> tuple[torch.Tensor, ...]:
        """This rank's rows of every reduced tensor."""
        return tuple(self._outputs)
