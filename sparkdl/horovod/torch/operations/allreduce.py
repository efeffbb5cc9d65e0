"""``hvd.allreduce`` and ``hvd.grouped_allreduce`` in their four forms, over the ranks of a process set.

A grouped allreduce reduces several tensors as one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Kind, Request, Result
from sparkdl.horovod.torch.handles import run_later, run_now
from sparkdl.horovod.torch.names import Adasum, choose, name_of
from sparkdl.horovod.torch.operations.adasum import GroupedAdasumRequest, SingleAdasumRequest, check_adasum
from sparkdl.horovod.torch.operations.preparation import (
    StreamPoint,
    check_outputs,
    check_reducible,
    copy_back,
    describe,
    find_target,
    is_buffer,
    new_output,
)
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
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
        self._stream_point = StreamPoint(tensors)
        self._buffers: list[torch.Tensor] = []

    def match(self, communicator: Communicator) -> None:
        """Reduce all tensors of the first one's dtype."""
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
        """Reduce the tensors of other dtypes, and fill the outputs that could not be reduced in place."""
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
        name: name by which the ranks match the operation; numbered in the order of submission if None.
        compression: compressor for the tensor that is sent.
        op: ``Average``, the default, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: factor by which the tensor is multiplied before the reduction.
        postscale_factor: factor by which the result is multiplied.
        process_set: ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        HorovodInternalError: on all ranks, if they disagree about the tensor, the operation or the factors.
        ValueError: if the tensor is not supported, or this rank is not in the process set.
    """
    compressed, ctx = compression.compress(tensor)
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    if compressed.requires_grad and torch.is_grad_enabled():
        reduced = _Allreduce.apply(compressed, name, *options)
    else:
        reduced = run_now(*_single_request(compressed, new_output(compressed), name, *options))
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
    return run_now(*_single_request(tensor, tensor, name, *options))


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
    return run_later(*_single_request(tensor, new_output(tensor), name, *options))


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
    return run_later(*_single_request(tensor, tensor, name, *options))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *options: Any) -> torch.Tensor:
        ctx.options = options
        reduced: torch.Tensor = run_now(*_single_request(tensor, new_output(tensor), name, *options))
        return reduced

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.options
        grad = allreduce(
            grads[0],
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return grad, None, None, None, None, None


def _single_request(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> tuple[Engine, Request[torch.Tensor]]:
    if op == Adasum:
        check_adasum([tensor], process_set)
        check_outputs([output])
        engine, full_name = find_target(process_set, "Allreduce", name)
        return engine, SingleAdasumRequest(
            full_name, [tensor], [output], prescale=prescale, postscale=postscale
        )
    check_reducible([tensor], op)
    check_outputs([output])
    engine, full_name = find_target(process_set, "Allreduce", name)
    return engine, SingleAllreduceRequest(
        full_name, [tensor], [output], op=op, prescale=prescale, postscale=postscale
    )


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
        name: name by which the ranks match the group; numbered in the order of submission if None.
        compression: compressor for the tensors that are sent.
        op: reduction, as for one tensor.
        prescale_factor: factor by which the tensors are multiplied before the reduction.
        postscale_factor: factor by which the results are multiplied.
        process_set: ranks that take part.

    Returns:
        New tensors of the same shapes and dtypes.
    """
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    options = (choose(op, average), prescale_factor, postscale_factor, process_set)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sent):
        reduced = _GroupedAllreduce.apply(name, options, *sent)
    else:
        reduced = run_now(*_grouped_request(sent, [new_output(tensor) for tensor in sent], name, *options))
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
    return run_now(*_grouped_request(tensors, tensors, name, *options))


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
    return run_later(*_grouped_request(tensors, [new_output(tensor) for tensor in tensors], name, *options))


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
    return run_later(*_grouped_request(tensors, tensors, name, *options))


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.options = options
        return run_now(*_grouped_request(tensors, [new_output(tensor) for tensor in tensors], name, *options))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.options
        reduced = grouped_allreduce(
            grads,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return None, None, *reduced


def _grouped_request(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> tuple[Engine, Request[tuple[torch.Tensor, ...]]]:
    tensors, outputs = list(tensors), list(outputs)
    if op == Adasum:
        check_adasum(tensors, process_set)
        check_outputs(outputs)
        engine, full_name = find_target(process_set, "Grouped_allreduce", name)
        return engine, GroupedAdasumRequest(
            full_name, tensors, outputs, prescale=prescale, postscale=postscale
        )
    check_reducible(tensors, op)
    check_outputs(outputs)
    engine, full_name = find_target(process_set, "Grouped_allreduce", name)
    return engine, GroupedAllreduceRequest(
        full_name, tensors, outputs, op=op, prescale=prescale, postscale=postscale
    )
