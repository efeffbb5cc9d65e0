"""Reducing tensors over the ranks of a process set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Kind
from sparkdl.horovod.torch.engine.request import Request, Result
from sparkdl.horovod.torch.reduce_ops import name_of
from sparkdl.horovod.torch.requests.describing import describe
from sparkdl.horovod.torch.requests.host_memory import Arrival, copy_back, is_buffer
from sparkdl.torch.buffers import export


class AllreduceRequest(Request[Result]):
    """Reduces tensors into outputs of the same shapes, which may be the same tensors."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        op: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        super().__init__(
            describe(Kind.ALLREDUCE, name, tensors, op=op, prescale=prescale, postscale=postscale)
        )
        self._tensors = tensors
        self._outputs = outputs
        self._arrival = Arrival(tensors)
        self._buffers: list[torch.Tensor] = []

    def match(self, communicator: Communicator) -> None:
        """Reduce all tensors of the first one's dtype."""
        if not self._buffers:
            self._arrival.wait()
            self._buffers = [
                _buffer_for(tensor, output)
                for tensor, output in zip(self._tensors, self._outputs, strict=True)
            ]
        if self._buffers:
            self._reduce(communicator, self._buffers[0].dtype)
        else:
            communicator.barrier(name=self.label)

    def complete(self, communicator: Communicator) -> None:
        """Reduce the tensors of other dtypes, and fill the outputs that could not be reduced where they lie."""
        dtypes = dict.fromkeys(buffer.dtype for buffer in self._buffers)
        for dtype in list(dtypes)[1:]:
            self._reduce(communicator, dtype)
        for buffer, output in zip(self._buffers, self._outputs, strict=True):
            copy_back(buffer, output)
        self._buffers = []

    def _reduce(self, communicator: Communicator, dtype: torch.dtype) -> None:
        arrays = [export(buffer) for buffer in self._buffers if buffer.dtype == dtype]
        description = self.description
        options: dict[str, Any] = {
            "op": name_of(description.op),
            "prescale": description.prescale,
            "postscale": description.postscale,
            "name": self.label,
        }
        if len(arrays) == 1:
            communicator.allreduce(arrays[0], **options)
        else:
            communicator.allreduce_group(arrays, **options)


class SingleAllreduceRequest(AllreduceRequest[torch.Tensor]):
    """Reduces one tensor."""

    def result(self) -> torch.Tensor:
        """The output."""
        return self._outputs[0]


class GroupedAllreduceRequest(AllreduceRequest[tuple[torch.Tensor, ...]]):
    """Reduces several tensors."""

    def result(self) -> tuple[torch.Tensor, ...]:
        """The outputs."""
        return tuple(self._outputs)


def _buffer_for(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """What is reduced in place: the output where it can be, else a copy; filled with the tensor."""
    if not is_buffer(output):
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if output is not tensor:
        output.detach().copy_(tensor.detach())
    return output.detach()
