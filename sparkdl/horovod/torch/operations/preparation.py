"""The preparation of every collective: its buffers, its engine and name, its checks and its description.

Tensors are converted to the contiguous CPU buffers that a communicator takes, and back. The engine is that of a
process set; the ranks match an operation by its name. The checks refuse tensors that cannot be communicated. The
description of a request is made from its tensors, and cached, as the same tensors come in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Description, Kind, Request, refuse_join
from sparkdl.horovod.torch.handles import run_now
from sparkdl.horovod.torch.names import Average, HorovodInternalError
from sparkdl.horovod.torch.names import name_of as reduction_name
from sparkdl.horovod.torch.operations import device_route
from sparkdl.horovod.torch.process_sets import ProcessSet, engine_of
from sparkdl.torch.buffers import ELEMENT_DTYPES
from sparkdl.torch.buffers import as_bytes as tensor_bytes

_AVERAGED_DTYPES = ELEMENT_DTYPES - {torch.bool}


class StreamPoint:
    """The point on an accelerator's streams at which tensors are complete; CPU tensors always are."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._events = []
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def follow(self) -> None:
        """Make the current stream wait for the work that was on the streams when this object was made."""
        for event in self._events:
            event.wait()

    def wait(self) -> None:
        """Block until the work that was on the streams when this object was made is complete."""
        for event in self._events:
            event.synchronize()


class TensorsRequest(Request[Any]):
    """A request for one tensor, or for a group of tensors as one operation.

    The tensors take the route of their device, if that can carry the request out; else they go through host memory.

    Args:
        description: description that the ranks must agree on.
        tensors: tensors to read.
        outputs: tensors to write, which may be the same; empty if ``complete`` makes them.
        is_group: whether the result is a tuple of tensors, rather than one tensor.
    """

    _given: np.ndarray[Any, Any]
    """What the ranks have gathered: see :func:`gather_numbers`."""

    def __init__(
        self,
        description: Description,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] = (),
        *,
        is_group: bool = False,
    ) -> None:
        super().__init__(description)
        self._tensors = tensors
        self._outputs = list(outputs)
        self._is_group = is_group
        self._stream_point = StreamPoint(tensors)
        self._arrival: device_route.StreamMark | None = None
        self._device = tensors[0].device if description.device else None

    def match(self, communicator: Communicator) -> None:
        """Gather a one from every rank; ranks that have joined contribute a zero."""
        self._gather(communicator, ())

    def _gather(self, communicator: Communicator, numbers: Sequence[int]) -> None:
        """Gather numbers as :func:`gather_numbers`, and whether the tensors are on the GPU of the route."""
        is_elsewhere = self._device is None or device_route.routes.is_elsewhere(communicator, self._device)
        place = _ELSEWHERE if is_elsewhere else _ON_ROUTE
        self._given = gather_numbers(communicator, numbers, self.label, place)

    def _route(self, communicator: Communicator) -> device_route.DeviceRoute | None:
        """The route for this request, the same on all ranks; None for host memory, also if a rank has joined."""
        if self._device is None or not (self._given[:, 0] == _ON_ROUTE).all():
            return None
        return device_route.routes.of(communicator, self._device)

    def is_complete(self) -> bool:
        """Whether the request has run, and its outputs are complete on the device."""
        return self.done and (self._arrival is None or self._arrival.has_come())

    def result(self) -> Any:
        """The output, or the tuple of all outputs; the caller's stream waits for them."""
        if self._arrival is not None:
            self._arrival.join()
        return tuple(self._outputs) if self._is_group else self._outputs[0]


class ReductionRequest(TensorsRequest):
    """A request that reduces tensors of all ranks; each kind of reduction is a subclass.

    For the tensors see :class:`TensorsRequest`, for the other arguments the attributes of :class:`Description`.
    """

    kind: ClassVar[Kind]

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] = (),
        *,
        op: int,
        prescale: float,
        postscale: float,
        is_group: bool,
    ) -> None:
        description = describe(self.kind, name, tensors, op=op, prescale=prescale, postscale=postscale)
        super().__init__(description, tensors, outputs, is_group=is_group)

    def _options(self) -> dict[str, Any]:
        """The options of the communicator's reduction."""
        return {
            "op": reduction_name(self.description.op),
            "prescale": self.description.prescale,
            "postscale": self.description.postscale,
            "name": self.label,
        }


def is_buffer(tensor: torch.Tensor) -> bool:
    """Whether the communicator can read and write this tensor in place."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def as_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is a buffer, else a copy that is one."""
    tensor = tensor.detach()
    if is_buffer(tensor):
        return tensor
    return tensor.resolve_conj().resolve_neg().to("cpu").contiguous()


def copy_back(buffer: torch.Tensor, output: torch.Tensor) -> None:
    """Copy a buffer made by :func:`as_buffer` to its output, unless it is the output; complete when this returns."""
    if buffer.data_ptr() == output.data_ptr() and is_buffer(output):
        return
    output.detach().copy_(buffer)
    if output.is_cuda:
        torch.cuda.current_stream(output.device).synchronize()


def as_bytes(buffer: torch.Tensor) -> Any:
    """A buffer's bytes as an array over the same memory, to move tensors of any dtype."""
    return tensor_bytes(buffer).numpy()


def bytes_per_row(tensor: torch.Tensor) -> int:
    """Bytes of one entry along the first dimension."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def refuse_scalars(kind: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors without dimensions, which have no rows.

    Raises:
        HorovodInternalError: if there is one.
    """
    if any(tensor.dim() == 0 for tensor in tensors):
        raise HorovodInternalError(f"Process-set rank zero tried to {kind} a rank-zero tensor.")


def split_rows(num_rows: int, world_size: int) -> list[int]:
    """Divide rows among ranks as evenly as possible; the first ranks get one more of a remainder."""
    least, remaining = divmod(num_rows, world_size)
    return [least + (rank < remaining) for rank in range(world_size)]


def find_target(process_set: ProcessSet, operation: str, name: str | None) -> tuple[Engine, str]:
    """The engine of a process set, and the name under which the ranks match an operation.

    Args:
        process_set: process set in which the operation runs.
        operation: name of the operation in Horovod's errors, such as ``"Allreduce"``; in lower case it is the prefix of
            the name.
        name: name that the caller gave; numbered in the order of submission if None.

    Raises:
        HorovodInternalError: if ``init`` has not been called.
        ValueError: if there is no such process set, it belongs to an earlier world, or this rank is not in it.
    """
    engine = engine_of(process_set, operation.removeprefix("Grouped_").capitalize())
    return engine, name_of(engine, operation, name)


def name_of(engine: Engine, operation: str, name: str | None) -> str:
    """The name under which the ranks match an operation, which must be submitted afterwards.

    If only this rank took a number, its next unnamed operation would not match that of the other ranks.
    """
    prefix = operation.lower()
    return f"{prefix}.{name or f'noname.{engine.outstanding.next_number(prefix)}'}"


def check_reducible(tensors: Sequence[torch.Tensor], op: int) -> None:
    """Check that tensors can be reduced by an operation, before submission: a later failure ends the session.

    Raises:
        ValueError: if a tensor is sparse, or of a dtype that the operation does not support.
        HorovodInternalError: if they are not on one device.
    """
    check_tensors(tensors, _AVERAGED_DTYPES if op == Average else ELEMENT_DTYPES)


def check_tensors(tensors: Sequence[torch.Tensor], dtypes: Collection[torch.dtype] | None = None) -> None:
    """Check that tensors can be communicated.

    Args:
        tensors: strided tensors, all on one device.
        dtypes: dtypes that are allowed; None for any.

    Raises:
        ValueError: if a tensor is sparse, quantized or without memory, or its dtype is not allowed.
        HorovodInternalError: if they are not on one device.
    """
    if len({tensor.device for tensor in tensors}) > 1:
        raise HorovodInternalError("Tensors in list must be on same device.")
    refuse_subclasses(tensors)
    for tensor in tensors:
        has_values = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
        if not has_values or (dtypes is not None and tensor.dtype not in dtypes):
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")


def refuse_subclasses(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors whose values are not in their own memory, such as DTensors.

    Raises:
        ValueError: if there is one.
    """
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
            raise ValueError(
                f"A {type(tensor).__name__} is not supported: the values of a tensor have to be in its own memory. For "
                "a DTensor, as FSDP2 makes them, use torch.distributed, or pass tensor.to_local()."
            )


def check_outputs(outputs: Sequence[torch.Tensor]) -> None:
    """Check that results can be written to tensors that :func:`check_tensors` accepts.

    Raises:
        ValueError: if several elements of a tensor share one place in memory, as in an expanded tensor.
    """
    for output in outputs:
        if any(extent > 1 and step == 0 for extent, step in zip(output.shape, output.stride(), strict=True)):
            raise ValueError(
                f"A result cannot be written to a tensor of shape {tuple(output.shape)} and strides "
                f"{output.stride()}, because several elements lie at one place; pass tensor.contiguous()."
            )


def new_output(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous, uninitialized tensor of the same shape, dtype and device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


_PLAIN: dict[str, type[int] | type[float]] = {
    "op": int,
    "root": int,
    "root_rank": int,
    "prescale": float,
    "postscale": float,
}


def describe(kind: Kind, name: str, tensors: Sequence[torch.Tensor], **options: Any) -> Description:
    """Describe a request.

    Args:
        kind: kind of the request.
        name: name under which the request is matched.
        tensors: tensors of the request.
        options: numeric attributes of :class:`~sparkdl.horovod.torch.engine.request.Description`; numbers of NumPy or
            torch are converted.
    """
    dtypes, shapes = tuple(tensor.dtype for tensor in tensors), tuple(tensor.shape for tensor in tensors)
    numbers = tuple((option, _PLAIN[option](value)) for option, value in options.items())
    device = device_route.routes.kind_of(tensors)
    return _describe(kind, name, dtypes, shapes, (*numbers, ("device", device)) if device else numbers)


@lru_cache(maxsize=4096)
def _describe(
    kind: Kind,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[torch.Size, ...],
    options: tuple[tuple[str, Any], ...],
) -> Description:
    return Description(
        kind=kind,
        name=name,
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
        shapes=tuple(tuple(shape) for shape in shapes),
        **dict(options),
    )


_ON_ROUTE, _ELSEWHERE = 1, 2


def gather_numbers(
    communicator: Communicator, numbers: Sequence[int], label: str, place: int = _ELSEWHERE
) -> np.ndarray[Any, Any]:
    """Gather ``place`` and the numbers of every rank, ``(ranks, 1 + numbers)``; ranks that joined contribute zeros."""
    row = np.array([place, *numbers])
    gathered = np.zeros((communicator.world_size, row.size), np.int64)
    communicator.allgather(row, gathered, name=label)
    return gathered


def refuse_ranks_that_joined(kind: Kind, given: np.ndarray[Any, Any]) -> None:
    """Refuse to continue if a rank has joined: its row of ``given`` begins with zero instead of one.

    Raises:
        HorovodInternalError: if a rank has joined; the same on all ranks.
    """
    joined = [rank for rank, first in enumerate(given[:, 0].tolist()) if not first]
    error = refuse_join(kind, joined)
    if error is not None:
        raise HorovodInternalError(error)


Prepare = Callable[[Sequence[torch.Tensor]], tuple[Engine, Request[Any]]]
"""Returns the request of an operation on tensors, and the engine that runs it."""

PullBack = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Returns the gradients of an operation's tensors from those of its outputs."""


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prepare: Prepare, pull_back: PullBack, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.pull_back = pull_back
        return run_with_gradients(tensors, prepare, pull_back)  # gradients are not enabled in here

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.pull_back(grads)


def run_with_gradients(
    tensors: Sequence[torch.Tensor], prepare: Prepare, pull_back: PullBack
) -> tuple[torch.Tensor, ...]:
    """Run an operation and return its outputs; gradients flow back if they are enabled and a tensor needs them."""
    outputs: Any
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        outputs = _WithGradients.apply(prepare, pull_back, *tensors)
    else:
        outputs = run_now(*prepare(tensors))
    return outputs if isinstance(outputs, tuple) else (outputs,)
