"""Tensors as the contiguous CPU buffers that a communicator takes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.horovod.torch.exceptions import HorovodInternalError
from sparkdl.torch.buffers import as_bytes as tensor_bytes

REDUCED_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    }
)


AVERAGED_DTYPES = REDUCED_DTYPES - {torch.bool}


class Arrival:
    """The moment on an accelerator's stream when tensors are complete; passed at once on the CPU."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._events = []
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def wait(self) -> None:
        """Block until the tensors hold what their owner's thread had put on the stream for them."""
        for event in self._events:
            event.synchronize()


def is_buffer(tensor: torch.Tensor) -> bool:
    """The communicator can read and write this tensor where it lies."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def as_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where it is a buffer, else a copy that is."""
    tensor = tensor.detach()
    if is_buffer(tensor):
        return tensor
    return tensor.resolve_conj().resolve_neg().to("cpu").contiguous()


def copy_back(buffer: torch.Tensor, output: torch.Tensor) -> None:
    """Write what :func:`as_buffer` made of an output, unless it is the output; complete when this returns."""
    if buffer.data_ptr() == output.data_ptr() and is_buffer(output):
        return
    output.detach().copy_(buffer)
    if output.is_cuda:
        torch.cuda.current_stream(output.device).synchronize()


def as_bytes(buffer: torch.Tensor) -> Any:
    """A buffer's bytes as an array over the same memory: how any dtype is moved without being read."""
    return tensor_bytes(buffer).numpy()


def bytes_per_row(tensor: torch.Tensor) -> int:
    """Bytes of one entry along the first dimension."""
    num_elements = 1
    for extent in tensor.shape[1:]:
        num_elements *= extent
    return num_elements * tensor.element_size()


def refuse_scalars(kind: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors without dimensions, of which no rows can be told apart.

    Raises:
        HorovodInternalError: if there is one.
    """
    if any(tensor.dim() == 0 for tensor in tensors):
        raise HorovodInternalError(f"Process-set rank zero tried to {kind} a rank-zero tensor.")


def split_rows(num_rows: int, world_size: int) -> list[int]:
    """Divide rows among ranks as evenly as can be; the first ranks have one more where it does not come out even."""
    least, remaining = divmod(num_rows, world_size)
    return [least + (rank < remaining) for rank in range(world_size)]
