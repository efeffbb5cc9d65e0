"""The stream beside the caller's on which collectives of CUDA tensors run, so that they overlap with computation.

The backends in this package use ``torch.cuda`` only through a :class:`GpuLane`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sparkdl.collective import Handle


class GpuLane:
    """The stream on which collectives of one GPU run, and the ways to wait for them.

    Args:
        device: device of the GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._number = int(self._side.cuda_stream)

    @contextmanager
    def beside(self, tensors: Sequence[torch.Tensor], *, asynchronous: bool) -> Iterator[int]:
        """Within this context, torch's work runs after the caller's stream so far; yields the number of its stream.

        Args:
            tensors: tensors that the work within reads and writes.
            asynchronous: whether the caller's stream continues meanwhile; if not, the work runs on that stream.
        """
        current = torch.cuda.current_stream(self._device)
        if not asynchronous:
            yield int(current.cuda_stream)
            return
        self._side.wait_stream(current)
        with self.on_side(tensors) as number:
            yield number

    def streams(self, *, asynchronous: bool) -> tuple[int, int]:
        """The numbers of the stream for an operation of NCCL and of the caller's stream, which it follows.

        Args:
            asynchronous: whether the caller's stream continues meanwhile; if not, both are that stream.
        """
        current = int(torch._C._cuda_getCurrentRawStream(self._device.index))
        return (self._number if asynchronous else current), current

    def is_capturing(self) -> bool:
        """Whether the caller's stream is being captured in a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def on_side(self, tensors: Sequence[torch.Tensor]) -> Iterator[int]:
        """Within this context, torch's work runs on the lane's own stream; yields its number.

        Args:
            tensors: tensors that the work within reads and writes.
        """
        with torch.cuda.stream(self._side):
            try:
                yield self._number
            finally:
                self.keep(tensors)

    @contextmanager
    def after(self, mark: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> Iterator[int]:
        """Within this context, torch's work runs beside the caller's stream, after a mark; yields its stream's number.

        Unlike :meth:`beside` it may be entered on any thread, and does not wait for other work on the caller's stream.

        Args:
            mark: mark after which the work runs, besides all earlier work on its own stream.
            tensors: tensors that the work within reads and writes; the caller keeps them until then.
        """
        with self.on_side(tensors) as number:
            self._side.wait_event(mark)
            yield number

    def order(self, _: Handle) -> None:
        """Order torch's later work on the same stream after a handle's operations; a stream does so by itself."""

    def mark(self) -> torch.cuda.Event:
        """Return a mark of the point that the current stream has reached, for :meth:`join` and :meth:`block`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self, mark: torch.cuda.Event) -> None:
        """Make the caller's stream wait for a mark; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def has_reached(self, mark: torch.cuda.Event) -> bool:
        """Whether the GPU has completed the work before a mark."""
        return bool(mark.query())

    def block(self, mark: torch.cuda.Event) -> None:
        """Make the host wait for a mark."""
        mark.synchronize()

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of tensors that were made on the lane's stream until the caller is done with them."""
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def host_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in pinned memory of the same shape and dtype, for asynchronous copies to and from the device."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")

    def new_future(self) -> torch.futures.Future[Any]:
        """A future whose value may be on the device; its waiters are ordered after the stream that set it."""
        return torch.futures.Future(devices=[self._device])

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of the tensors from reuse by the caller's stream before the lane's stream is done."""
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(self._side)
