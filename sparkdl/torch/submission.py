"""The submission of a process group's operations to its communicator.

Operations with ``asyncOp`` are queued to the communicator's progress thread; the others run on the caller's thread
before the call returns. While torch's profiler runs on that thread, each call is an event: ``sparkdl:all_reduce`` and
so on, named as those of torch's own backends. The event ends when the call returns, so for an asynchronous operation it
covers the start only; the time spent in its ``wait`` is an event ``sparkdl:wait``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import export, restore
from sparkdl.torch.futures import FutureCompleter
from sparkdl.torch.work import CollectiveWork, CompletedWork, seconds

if TYPE_CHECKING:
    from sparkdl.collective import Communicator, Handle
    from sparkdl.torch.gpu.accelerator import TorchAccelerator
    from sparkdl.torch.gpu.nccl import NcclAccelerator
    from sparkdl.torch.gpu.staged import StagedAccelerator

    Accelerator: TypeAlias = TorchAccelerator | NcclAccelerator | StagedAccelerator
    """The backend of a process group for tensors on its ranks' GPUs, with c10d's methods of collectives."""

Finish = Callable[[], None]
"""Writes a result from its staging buffers to where the caller wants it."""

ALL_REDUCE, ALL_REDUCE_COALESCED = AllreduceOptions(), AllreduceCoalescedOptions()
REDUCE, REDUCE_SCATTER = ReduceOptions(), ReduceScatterOptions()
ALL_GATHER, ALL_TO_ALL, BROADCAST = AllgatherOptions(), AllToAllOptions(), BroadcastOptions()
GATHER, SCATTER, BARRIER = GatherOptions(), ScatterOptions(), BarrierOptions()
"""The options of calls that give none. They are not changed."""

Method = TypeVar("Method", bound=Callable[..., Any])


def recorded(name: str, argument: int = 0) -> Callable[[Method], Method]:
    """Decorate a method so that torch's profiler, while it runs, records each call as an event.

    Args:
        name: name of the event, without the prefix ``sparkdl:``.
        argument: position of the argument whose tensors' shapes the event shows.
    """
    event = f"sparkdl:{name}"

    def decorate(method: Method) -> Method:
        @wraps(method)
        def run(self: Any, *arguments: Any, **options: Any) -> Any:
            if not profiler._is_profiler_enabled:
                return method(self, *arguments, **options)
            with _RecordFunctionFast(event, tensors_in(arguments[argument : argument + 1])):
                return method(self, *arguments, **options)

        return run  # type: ignore[return-value]  # it takes the same arguments

    return decorate


def tensors_in(argument: Any) -> list[torch.Tensor]:
    """The tensors of an argument, which may be in lists to any depth."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [tensor for entry in argument for tensor in tensors_in(entry)]
    return []


class _Coalesced(threading.local):
    """What a thread has coalesced since ``_start_coalescing``; None while it does not coalesce."""

    items: list[Any] | None = None


class OwnAccelerator:
    """What the accelerators of sparkdl's own have in common; c10d's methods for one pair of tensors, for example."""

    allgather_into_tensor_coalesced: Callable[..., Any]
    reduce_scatter_tensor_coalesced: Callable[..., Any]

    def __init__(self) -> None:
        self._coalesced = _Coalesced()

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = ALL_GATHER) -> Any:
        """Concatenate the tensors of all ranks in ``output``; ``tensor`` may be a slice of it."""
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = REDUCE_SCATTER
    ) -> Any:
        """Reduce the inputs over the ranks and keep this rank's block of the result in ``output``."""
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def _start_coalescing(self, _: torch.device) -> None:
        self._coalesced.items = []

    def drop_coalesced(self, _: torch.device) -> None:
        """After an error, forget the operations since :meth:`_start_coalescing` that have not begun."""
        self._coalesced.items = None


class Submission:
    """The first and last steps of every collective of a process group."""

    communicator: Communicator
    timeout_s: float
    accelerator: Accelerator | None
    _completer: FutureCompleter
    _coalesced: list[CollectiveWork] | None

    def _call(
        self,
        name: str,
        opts: Any,
        *buffers: torch.Tensor | Sequence[torch.Tensor] | None,
        **arguments: Any,
    ) -> list[Handle]:
        """Run an operation of the communicator to its end, or queue it and return its handle."""
        arrays = [
            export(buffer)
            if isinstance(buffer, torch.Tensor)
            else buffer and [export(tensor) for tensor in buffer]
            for buffer in buffers
        ]
        arguments["timeout_s"] = self._deadline_of(opts)
        if getattr(opts, "asyncOp", True):
            return [getattr(self.communicator, f"{name}_async")(*arrays, **arguments)]
        getattr(self.communicator, name)(*arrays, **arguments)
        return []

    def _deadline_of(self, opts: Any) -> float:
        return seconds(getattr(opts, "timeout", None)) or self.timeout_s

    def _work(
        self, outputs: Sequence[torch.Tensor], handles: Sequence[Handle], finishes: Sequence[Finish] = ()
    ) -> CollectiveWork | CompletedWork:
        """The ``Work`` of operations in progress, or of complete ones if there are no handles."""
        if not handles:
            for finish in finishes:
                finish()
            return CompletedWork(outputs)
        work = CollectiveWork(outputs, handles, self._completer, finishes)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def serves(self, tensor: torch.Tensor) -> bool:
        """Whether this group serves a tensor itself: it is on the CPU.

        Tests of accelerators on machines without a GPU override this and :meth:`serves_device`.
        """
        return tensor.is_cpu

    def serves_device(self, device: torch.device) -> bool:
        """Whether this group serves the tensors of a device itself."""
        return torch.device(device).type == "cpu"

    def accelerator_of(self, tensor: torch.Tensor) -> Any:
        """The accelerator for a tensor that this group does not serve itself; else None.

        Raises:
            ParamError: if it has no accelerator.
        """
        if self.serves(tensor):
            return None
        if self.accelerator is None:
            raise ParamError(
                f"This process group serves CPU tensors, got one on {tensor.device}. Move it to the CPU, or "
                "give every rank a GPU and leave cuda= of init_process_group as it is."
            )
        return self.accelerator


def as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The argument as a list: torch passes lists, users sometimes a single tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def restoring(buffer: torch.Tensor, tensor: torch.Tensor) -> Finish:
    """A finish that copies a buffer of :func:`sparkdl.torch.buffers.movable` or ``reducible`` back to its tensor."""
    return lambda: restore(buffer, tensor)
