"""The route of CUDA tensors: NCCL on one stream per process set, in the order on which the ranks agree.

A request for CUDA tensors is agreed upon as any other: its first operation on the communicator exchanges a few numbers
under its label. What follows is put on the route's stream, after the work that was on the caller's stream when the
request was made. The host does not wait for it: ``synchronize`` makes the caller's stream wait.

The first such request opens NCCL over the process set. Where ranks share a GPU and NCCL may not
(:func:`~sparkdl.collective.nccl.opening.may_share_gpus`), there is no route, and tensors travel through host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from sparkdl.collective import Communicator
from sparkdl.errors import CommunicatorError
from sparkdl.horovod.torch.engine.request import Description, Kind
from sparkdl.horovod.torch.names import Average, HorovodInternalError, name_of
from sparkdl.torch.buffers import PLAIN_OPS, as_bytes, is_flat, restore
from sparkdl.torch.gpu.accelerator import agree_on_backend, open_chosen
from sparkdl.torch.gpu.lanes import GpuLane
from sparkdl.torch.registration import RendezvousStore

if TYPE_CHECKING:
    from sparkdl.torch.submission import Accelerator

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_INTEGERS = frozenset({"bool", "int8", "uint8", "int32", "int64"})
_REDUCE_OPS = {name: op for op, name in PLAIN_OPS.items()}


def can_reduce(description: Description) -> bool:
    """Whether NCCL reduces what a request describes; other reductions are made in host memory.

    NCCL has no int16 and no Adasum; averages of integers and their products with factors would be rounded differently.
    """
    is_plain = description.op != Average and (description.prescale, description.postscale) == (1.0, 1.0)
    dtypes = _FLOATS | _INTEGERS if is_plain else _FLOATS
    return description.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) and dtypes >= set(description.dtypes)


class StreamMark:
    """The point on the route's stream at which the outputs of a request are complete."""

    def __init__(self, route: DeviceRoute, mark: Any, new: Sequence[torch.Tensor] = ()) -> None:
        """Describe the point.

        Args:
            route: route on whose stream it is.
            mark: mark of the point.
            new: outputs that were made on the route's stream.
        """
        self._route, self._mark, self._new = route, mark, new

    def has_come(self) -> bool:
        """Whether the GPU has completed the outputs, or they never will be."""
        return self._route.accelerator.failure is not None or self._route.lane.has_reached(self._mark)

    def join(self) -> None:
        """Make the caller's stream wait for the outputs; the host does not wait.

        Raises:
            HorovodInternalError: if NCCL has failed.
        """
        failure = self._route.accelerator.failure
        if failure is not None:
            raise HorovodInternalError(str(failure)) from failure
        self._route.lane.join(self._mark)
        self._route.lane.hand_over(self._new)


class DeviceRoute:
    """Collectives on tensors of this rank's GPU, over an accelerator whose calls are made on one stream."""

    def __init__(
        self, accelerator: Accelerator, lane: GpuLane, communicator: Communicator, device: torch.device
    ) -> None:
        """Take over an open accelerator.

        Args:
            accelerator: accelerator of the same ranks; closed by :meth:`close`.
            lane: lane whose stream is the route.
            communicator: communicator of the process set.
            device: device of the GPU.
        """
        self.accelerator, self.lane, self.device = accelerator, lane, device
        self._communicator = communicator

    def allreduce(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        description: Description,
        follow: Callable[[], None],
    ) -> StreamMark:
        """Reduce tensors into outputs of the same shapes, all as one operation of NCCL for each dtype.

        Args:
            pairs: tensors with their outputs, which may be the same.
            description: description with the operation and the factors.
            follow: function that makes the current stream follow the work that makes the tensors.
        """
        with self.lane.on_side([tensor for pair in pairs for tensor in pair]):
            follow()
            buffers = []
            for tensor, output in pairs:
                buffer = _buffer_of(output)
                if output is not tensor or not is_flat(output):
                    buffer.copy_(tensor.detach())
                buffers.append(buffer)
            _scale(buffers, description.prescale)
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
                alike = [buffer for buffer in buffers if buffer.dtype == dtype and buffer.numel()]
                if alike:
                    options = _options(AllreduceOptions)
                    options.reduceOp = _REDUCE_OPS[name_of(description.op)]
                    self.accelerator.allreduce_coalesced(alike, options).wait()
            _scale(buffers, description.postscale)
            for buffer, (_, output) in zip(buffers, pairs, strict=True):
                restore(buffer, output)
            return StreamMark(self, self.lane.mark())

    def reducescatter(
        self,
        tensors: Sequence[torch.Tensor],
        rows: Sequence[Sequence[int]],
        description: Description,
        follow: Callable[[], None],
    ) -> tuple[list[torch.Tensor], StreamMark]:
        """Reduce tensors and return this rank's rows; ``rows`` has the numbers of rows of all ranks, by tensor."""
        outputs = []
        with self.lane.on_side(tensors):
            follow()
            for tensor, of_ranks in zip(tensors, rows, strict=True):
                # The first ranks may have one row more; the blocks that NCCL reduces are equal.
                blocks = tensor.new_zeros((len(of_ranks), max(of_ranks), *tensor.shape[1:]))
                for block, part in zip(blocks, tensor.detach().split(list(of_ranks)), strict=True):
                    block[: len(part)].copy_(part)
                block = torch.empty_like(blocks[0])
                if block.numel():
                    _scale([blocks], description.prescale)
                    options = _options(ReduceScatterOptions)
                    options.reduceOp = _REDUCE_OPS[name_of(description.op)]
                    self.accelerator._reduce_scatter_base(block, blocks, options).wait()
                    _scale([block], description.postscale)
                outputs.append(block[: of_ranks[self._communicator.rank]])
            return outputs, StreamMark(self, self.lane.mark(), outputs)

    def broadcast(
        self, tensor: torch.Tensor, output: torch.Tensor, root: int, follow: Callable[[], None]
    ) -> StreamMark:
        """Fill an output, which may be the tensor itself, with the root's tensor."""
        with self.lane.on_side([tensor, output]):
            follow()
            buffer = _buffer_of(output)
            if self._communicator.rank == root and (output is not tensor or not is_flat(output)):
                buffer.copy_(tensor.detach())
            if buffer.numel():
                options = _options(BroadcastOptions)
                options.rootRank = root
                self.accelerator.broadcast([as_bytes(buffer)], options).wait()
            restore(buffer, output)
            return StreamMark(self, self.lane.mark())

    def allgather(
        self, tensors: Sequence[torch.Tensor], rows: Sequence[Sequence[int]], follow: Callable[[], None]
    ) -> tuple[list[torch.Tensor], StreamMark]:
        """Concatenate the ranks' rows of each tensor; ``rows`` has the numbers of rows of all ranks, by tensor."""
        with self.lane.on_side(tensors):
            follow()
            outputs = [
                torch.empty((sum(of_ranks), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
                for tensor, of_ranks in zip(tensors, rows, strict=True)
            ]
            for tensor, output, of_ranks in zip(tensors, outputs, rows, strict=True):
                if not output.numel():
                    continue
                mine = as_bytes(tensor)
                if len(set(of_ranks)) == 1:
                    options = _options(AllgatherOptions)
                    self.accelerator._allgather_base(as_bytes(output), mine, options).wait()
                else:
                    parts = [as_bytes(part) for part in output.split(list(of_ranks))]
                    self.accelerator.allgather([parts], [mine], _options(AllgatherOptions)).wait()
            return outputs, StreamMark(self, self.lane.mark(), outputs)

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], follow: Callable[[], None]
    ) -> tuple[torch.Tensor, StreamMark]:
        """Send ``sent[r]`` rows to rank r and receive ``received[r]`` rows from it."""
        with self.lane.on_side([tensor]):
            follow()
            output = torch.empty((sum(received), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
            width = math.prod(tensor.shape[1:]) * tensor.element_size()
            mine = as_bytes(tensor[: sum(sent)])
            received_bytes, sent_bytes = ([count * width for count in counts] for counts in (received, sent))
            options = _options(AllToAllOptions)
            self.accelerator.alltoall_base(as_bytes(output), mine, received_bytes, sent_bytes, options).wait()
            return output, StreamMark(self, self.lane.mark(), [output])

    def close(self) -> None:
        """Complete what is on the stream and close the accelerator, or abort it if the communicator has failed."""
        try:
            if self._communicator.failure is not None:
                self.accelerator.abort()
            self.accelerator.shutdown()
        except CommunicatorError:
            if self._communicator.failure is None:
                raise


class Routes:
    """The routes of this process's communicators, opened when a request first needs one."""

    def __init__(self) -> None:
        """Start without routes."""
        self._routes: WeakKeyDictionary[Communicator, DeviceRoute | None] = WeakKeyDictionary()
        self._device = torch.device("cpu")

    def kind_of(self, tensors: Sequence[torch.Tensor]) -> str:
        """Type of the device of tensors that take the route; empty for others."""
        if not tensors or not self.serves(tensors[0]):
            return ""
        self._device = tensors[0].device
        return self._device.type

    def serves(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor takes the route: it is on a GPU. Tests on machines without a GPU override this."""
        return tensor.is_cuda

    def is_elsewhere(self, communicator: Communicator, device: torch.device) -> bool:
        """Whether tensors on a device cannot take the route of a communicator: it is on another GPU of this process."""
        route = self._routes.get(communicator)
        is_unknown = (
            device.type == "cuda" and device.index is None
        )  # of zeros for a rank without CUDA tensors
        return is_unknown or (route is not None and route.device != device)

    def of(self, communicator: Communicator, device: torch.device) -> DeviceRoute | None:
        """The route of a communicator; None if tensors travel through host memory. The first call is collective."""
        if communicator not in self._routes:
            self._routes[communicator] = self.open(communicator, device)
        return self._routes[communicator]

    def open(self, communicator: Communicator, device: torch.device) -> DeviceRoute | None:
        """Open a route, collectively; None where ranks share a GPU that NCCL would refuse."""
        key, timeout_s = f"horovod/gpu/{communicator.name}", communicator.timeout_s
        count = communicator.rendezvous.add(f"{key}/openings/{communicator.rank}", 1)
        rendezvous = communicator.rendezvous.view(f"{key}/{count}")
        with torch.cuda.device(device):  # the engine's thread has chosen none
            chosen = agree_on_backend("auto", communicator, rendezvous, timeout_s, own=True)
            if chosen is None or chosen == "host":
                return None
            store = RendezvousStore(rendezvous, timeout_s=timeout_s)
            accelerator = open_chosen(chosen, communicator, rendezvous, store, timeout_s)
            return DeviceRoute(accelerator, GpuLane(device), communicator, device)

    def close(self, communicator: Communicator) -> None:
        """Close the route of a communicator, if it has one."""
        route = self._routes.pop(communicator, None)
        if route is not None:
            route.close()

    def device_of(self, kind: str) -> torch.device:
        """The device for the zeros of a request whose description has this device."""
        return self._device if kind == self._device.type else torch.device(kind or "cpu")


routes = Routes()


def _options(kind: Callable[[], Any]) -> Any:
    """Options of a call on the current stream, which is the route."""
    options = kind()
    options.asyncOp = False
    return options


def _buffer_of(output: torch.Tensor) -> torch.Tensor:
    """The output itself if NCCL can write to it, else a new tensor of its shape."""
    if is_flat(output):
        return output.detach()
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)


def _scale(tensors: Sequence[torch.Tensor], factor: float) -> None:
    if factor != 1.0 and tensors:
        torch._foreach_mul_(list(tensors), factor)
