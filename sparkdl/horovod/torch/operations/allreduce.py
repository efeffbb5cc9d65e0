"""``hvd.allreduce`` and ``hvd.grouped_allreduce`` in their four forms, over the ranks of a process set.

A grouped allreduce reduces several tensors as one operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Kind, Request
from sparkdl.horovod.torch.handles import run_later, run_now
from sparkdl.horovod.torch.names import Adasum, choose
from sparkdl.horovod.torch.operations import device_route
from sparkdl.horovod.torch.operations.adasum import AdasumRequest, check_adasum
from sparkdl.horovod.torch.operations.preparation import (
    ReductionRequest,
    check_outputs,
    check_reducible,
    copy_back,
    find_target,
    is_buffer,
    new_output,
    run_with_gradients,
)
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.torch.buffers import export

_MOST_FUSED = 31
"""Number of the requests that may follow one, and that run together with it on the route of a device."""


class AllreduceRequest(ReductionRequest):
    """Reduces tensors into outputs of the same shapes, which may be the same tensors.

    Requests for tensors on a device that follow each other on all ranks, with one operation and the same factors, run
    together. To find out, the ranks gather the digests of what follows on each of them.
    """

    kind = Kind.ALLREDUCE
    _buffers: Sequence[torch.Tensor] = ()
    _following: Sequence[AllreduceRequest] = ()
    fused: Sequence[AllreduceRequest] = ()

    @property
    def _takes_route(self) -> bool:
        return self._device is not None and device_route.can_reduce(self.description)

    def look_ahead(self, outstanding: Callable[[], Sequence[Request[Any]]]) -> None:
        """Find the requests that may run together with this one."""
        self.fused = self._following = ()
        if self._takes_route:
            alike = itertools.takewhile(self._is_alike, outstanding()[1:])
            self._following = list(itertools.islice(alike, _MOST_FUSED))  # type: ignore[arg-type]

    def _is_alike(self, other: Request[Any]) -> bool:
        mine, its = self.description, other.description
        return (
            isinstance(other, AllreduceRequest)
            and other._takes_route
            and other._device == self._device
            and (mine.op, mine.prescale, mine.postscale) == (its.op, its.prescale, its.postscale)
        )

    def match(self, communicator: Communicator) -> None:
        """Reduce all tensors of the first one's dtype; on the route of a device, gather the digests of what follows."""
        if not self._takes_route:
            self._match_in_host_memory(communicator)
            return
        digests = [request.description.digest for request in self._following]
        digests += [0] * (_MOST_FUSED - len(digests))
        self._gather(communicator, digests)
        is_common = (self._given[:, 1:] == self._given[:1, 1:]).all(axis=0)
        self.fused = [
            request
            for request, _ in itertools.takewhile(
                lambda pair: pair[1], zip(self._following, is_common, strict=False)
            )
        ]

    def _match_in_host_memory(self, communicator: Communicator) -> None:
        if not self._buffers:
            self._stream_point.wait()
            self._buffers = [
                _buffer_for(tensor, output)
                for tensor, output in zip(self._tensors, self._outputs, strict=True)
            ]
        if self._buffers:
            self._reduce(communicator, self._buffers[0].dtype)
        else:
            communicator.barrier(name=self.label)

    def complete(self, communicator: Communicator) -> None:
        """Reduce what ``match`` has not, and fill the outputs that could not be reduced in place."""
        if self._takes_route:
            route = self._route(communicator)
            if route is not None:
                self._run_together(route)
                return
            for request in self.fused:  # in host memory, one after another
                request._match_in_host_memory(communicator)
                request._complete_in_host_memory(communicator)
            self._match_in_host_memory(communicator)
        self._complete_in_host_memory(communicator)

    def _run_together(self, route: device_route.DeviceRoute) -> None:
        together = [self, *self.fused]
        pairs = [
            pair for request in together for pair in zip(request._tensors, request._outputs, strict=True)
        ]

        def follow() -> None:
            for request in together:
                request._stream_point.follow()

        arrival = route.allreduce(pairs, self.description, follow)
        for request in together:
            request._arrival = arrival

    def _complete_in_host_memory(self, communicator: Communicator) -> None:
        dtypes = dict.fromkeys(buffer.dtype for buffer in self._buffers)
        for dtype in list(dtypes)[1:]:
            self._reduce(communicator, dtype)
        for buffer, output in zip(self._buffers, self._outputs, strict=True):
            copy_back(buffer, output)
        self._buffers = ()

    def _reduce(self, communicator: Communicator, dtype: torch.dtype) -> None:
        arrays = [export(buffer) for buffer in self._buffers if buffer.dtype == dtype]
        if len(arrays) == 1:
            communicator.allreduce(arrays[0], **self._options())
        else:
            communicator.allreduce_group(arrays, **self._options())


def _buffer_for(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The buffer to reduce in place, filled with the tensor: the output if it is a buffer, else a new one."""
    if not is_buffer(output):
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if output is not tensor:
        output.detach().copy_(tensor.detach())
    return output.detach()


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks; the argument keeps its values. The gradient is reduced in the same way.

    Args:
        tensor: tensor of the same shape and dtype on every rank.
        average: deprecated by Horovod; use ``op``.
        name: name under which the ranks match the operation; numbered in the order of submission if None.
        compression: compressor for the tensor that is sent.
        op: ``Average``, the default, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: factor applied to the input before the reduction.
        postscale_factor: factor applied to the result.
        process_set: ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        HorovodInternalError: on all ranks, if they disagree about the tensor, the operation or the factors.
        ValueError: if the tensor is not supported, or this rank is not in the process set.
    """
    compressed, ctx = compression.compress(tensor)
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    (reduced,) = _run([compressed], name, options, is_group=False)
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks in place and return it; see :func:`allreduce`."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    reduced: torch.Tensor = run_now(*_request([tensor], [tensor], name, *options))
    return reduced


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce`, without gradients; ``synchronize`` returns a new tensor."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_later(*_request([tensor], [new_output(tensor)], name, *options))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce_`; ``synchronize`` returns the same tensor, reduced."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_later(*_request([tensor], [tensor], name, *options))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce tensors over the ranks; see :func:`~sparkdl.horovod.torch.allreduce`. Gradients are reduced likewise.

    Args:
        tensors: tensors of the same shapes and dtypes on every rank.
        average: deprecated by Horovod; use ``op``.
        name: name under which the ranks match the group; numbered in the order of submission if None.
        compression: compressor for the tensors that are sent.
        op: reduction, as for one tensor.
        prescale_factor: factor applied to the input before the reduction.
        postscale_factor: factor applied to the result.
        process_set: ranks that take part.

    Returns:
        New tensors of the same shapes and dtypes.
    """
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    reduced = _run(sent, name, options, is_group=True)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce tensors over the ranks in place and return them; see :func:`grouped_allreduce`."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    reduced: tuple[torch.Tensor, ...] = run_now(*_request(tensors, tensors, name, *options, is_group=True))
    return reduced


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce`, without gradients; ``synchronize`` returns a tuple of new tensors."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    outputs = [new_output(tensor) for tensor in tensors]
    return run_later(*_request(tensors, outputs, name, *options, is_group=True))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce_`; ``synchronize`` returns a tuple of the same tensors, reduced."""
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    return run_later(*_request(tensors, tensors, name, *options, is_group=True))


def _run(
    tensors: Sequence[torch.Tensor], name: str | None, options: tuple[Any, ...], *, is_group: bool
) -> tuple[torch.Tensor, ...]:
    """Reduce into new tensors, and return all of them."""
    op, prescale, postscale, process_set = options
    factors = {"prescale_factor": prescale, "postscale_factor": postscale}
    return run_with_gradients(
        tensors,
        lambda sent: _request(
            sent, [new_output(tensor) for tensor in sent], name, *options, is_group=is_group
        ),
        lambda grads: grouped_allreduce(grads, op=op, process_set=process_set, **factors),
    )


def _request(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    is_group: bool = False,
) -> tuple[Engine, ReductionRequest]:
    if op == Adasum:
        check_adasum(tensors, process_set)
    else:
        check_reducible(tensors, op)
    check_outputs(outputs)
    engine, full_name = find_target(process_set, "Grouped_allreduce" if is_group else "Allreduce", name)
    kind = AdasumRequest if op == Adasum else AllreduceRequest
    return engine, kind(
        full_name,
        list(tensors),
        list(outputs),
        op=op,
        prescale=prescale,
        postscale=postscale,
        is_group=is_group,
    )
