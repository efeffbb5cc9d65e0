"""The stream beside the caller's on which collectives of CUDA tensors run, so that they overlap with computation.

Runs on the *rank*. Everything that touches ``torch.cuda`` on the way of a collective is here; what the collectives do
is in :mod:`sparkdl.torch.nccl_tensors` and :mod:`sparkdl.torch.staged_tensors`, which know a lane by its protocol.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sparkdl.collective import Handle


class Lane(Protocol):
    """Where collectives of one device run, and how what comes after them waits."""

    def beside(self, tensors: Sequence[torch.Tensor], *, asynchronous: bool) -> AbstractContextManager[int]:
        """Have the work of torch inside run after what the caller's stream has so far, and give that stream's number.

        Args:
            tensors: what the work inside reads and writes.
            asynchronous: whether the caller's stream goes on meanwhile; it runs there otherwise.
        """

    def after(self, mark: Any, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[int]:
        """Have the work of torch inside run beside the caller's stream and after a mark, and give its stream's number.

        Unlike :meth:`beside` it may be entered on any thread, and does not wait for what else the caller's stream has.

        Args:
            mark: what the work comes after, besides all that was on its own stream before.
            tensors: what the work inside reads and writes; the caller keeps them until then.
        """

    def order(self, handle: Handle) -> None:
        """Have the work of torch that follows on the same stream come after what ``handle`` stands for."""

    def mark(self) -> Any:
        """The point that the current stream has reached, as :meth:`join` and :meth:`block` take it."""

    def join(self, mark: Any) -> None:
        """Have the caller's stream wait for a mark; the host does not."""

    def block(self, mark: Any) -> None:
        """Have the host wait for a mark."""

    def host_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory of the same shape, contiguous, that copies between it and the device need not wait for."""

    def new_future(self) -> torch.futures.Future[Any]:
        """A future whose value may lie on the device; who waits for it is ordered after where it was set."""


class GpuLane:
    """The lane of a GPU.

    Args:
        device: the GPU, with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    @contextmanager
    def beside(self, tensors: Sequence[torch.Tensor], *, asynchronous: bool) -> Iterator[int]:
        """See :class:`Lane`."""
        current = torch.cuda.current_stream(self._device)
        if not asynchronous:
            yield int(current.cuda_stream)
            return
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield int(self._side.cuda_stream)
        self._keep(tensors)

    @contextmanager
    def after(self, mark: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> Iterator[int]:
        """See :class:`Lane`."""
        with torch.cuda.stream(self._side):
            self._side.wait_event(mark)
            try:
                yield int(self._side.cuda_stream)
            finally:
                self._keep(tensors)

    def order(self, _: Handle) -> None:
        """See :class:`Lane`; streams keep their order by themselves."""

    def mark(self) -> torch.cuda.Event:
        """See :class:`Lane`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self, mark: torch.cuda.Event) -> None:
        """See :class:`Lane`."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def block(self, mark: torch.cuda.Event) -> None:
        """See :class:`Lane`."""
        mark.synchronize()

    def host_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Lane`; pinned memory."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def new_future(self) -> torch.futures.Future[Any]:
        """See :class:`Lane`."""
        return torch.futures.Future(devices=[self._device])

    def _keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Their memory must not be given to anything else of the caller's stream before this stream is done."""
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(self._side)
