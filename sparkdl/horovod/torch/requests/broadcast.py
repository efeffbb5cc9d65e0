"""Giving one rank's tensor to all ranks of a process set."""

from __future__ import annotations

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Kind
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.requests.describing import describe
from sparkdl.horovod.torch.requests.host_memory import Arrival, as_buffer, as_bytes, copy_back


class BroadcastRequest(Request[torch.Tensor]):
    """Fills an output, which may be the tensor, with the root's tensor."""

    def __init__(
        self, name: str, tensor: torch.Tensor, output: torch.Tensor, *, root: int, root_rank: int
    ) -> None:
        super().__init__(describe(Kind.BROADCAST, name, [tensor], root=root, root_rank=root_rank))
        self._tensor = tensor
        self._output = output
        self._arrival = Arrival([tensor])
        self._buffer: torch.Tensor | None = None

    def match(self, communicator: Communicator) -> None:
        """Broadcast the tensor."""
        if self._buffer is None:
            self._arrival.wait()
            if self._output is not self._tensor and communicator.rank == self.description.root:
                self._output.detach().copy_(self._tensor.detach())
            self._buffer = as_buffer(self._output)
        communicator.broadcast(as_bytes(self._buffer), root=self.description.root, name=self.label)

    def complete(self, communicator: Communicator) -> None:  # noqa: ARG002  # the contract's
        """Fill the output if it could not be filled where it lies."""
        if self._buffer is not None:
            copy_back(self._buffer, self._output)
            self._buffer = None

    def result(self) -> torch.Tensor:
        """The output."""
        return self._output
