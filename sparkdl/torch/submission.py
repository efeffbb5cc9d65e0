"""How a process group hands operations to its communicator.

Runs on the *rank*. Operations with ``asyncOp`` are queued to the communicator's progress thread; the others
run on the caller's thread before the call returns. While torch's profiler runs on that thread, each call is an event:
``sparkdl:all_reduce`` and so on, named as those of torch's own backends. The event ends when the call returns, so for
an asynchronous operation it covers the start only; the time spent in its ``wait`` is an event ``sparkdl:wait``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import export, restore
from sparkdl.torch.work import CollectiveWork, CompletedWork, FutureCompleter, seconds

if TYPE_CHECKING:
    from sparkdl.collective import Communicator, Handle

Finish = Callable[[], None]
"""Writes a result from its staging buffers to where the caller wants it."""


Method = TypeVar("Method", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)


def recorded(name: str, argument: int = 0) -> Callable[[Method], Method]:
    """Make the calls of a method events of torch's profiler, while it runs.

    Args:
        name: the event's, after ``sparkdl:``.
        argument: place of the argument whose tensors the event shows the shapes of.
    """
    event = f"sparkdl:{name}"

    def decorate(method: Method) -> Method:
        @wraps(method)
        def run(self: Any, *arguments: Any, **options: Any) -> Any:
            if not profiler._is_profiler_enabled:
                return method(self, *arguments, **options)
            with _RecordFunctionFast(event, _tensors_in(arguments[argument : argument + 1])):
                return method(self, *arguments, **options)

        return run  # type: ignore[return-value]  # it takes the same arguments

    return decorate


def called_as_it_is(kind: Kind) -> Kind:
    """Decorate a class whose methods ``torch.compile`` calls without compiling them and what they call.

    It does so with torch's own groups, as their methods are C++. What ``torch.compiler.disable`` does would take the
    import of the compiler, a second, in every rank.
    """
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            _not_compiled(method)
    return kind


def _not_compiled(method: FunctionType) -> None:
    method._torchdynamo_disable = True  # type: ignore[attr-defined]  # a frame that calls it does not inline it
    if hasattr(eval_frame, "set_code_exec_strategy"):  # since torch 2.7
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(method.__code__, eval_frame._FrameExecStrategy(skip, skip))


def _tensors_in(argument: Any) -> list[torch.Tensor]:
    """The tensors of an argument, which may be in lists to any depth."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [tensor for entry in argument for tensor in _tensors_in(entry)]
    return []


class Submission:
    """What every collective of a process group begins and ends with."""

    _communicator: Communicator
    _completer: FutureCompleter
    _timeout_s: float
    _accelerator: Any
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
            return [getattr(self._communicator, f"{name}_async")(*arrays, **arguments)]
        getattr(self._communicator, name)(*arrays, **arguments)
        return []

    def _deadline_of(self, opts: Any) -> float:
        return seconds(getattr(opts, "timeout", None)) or self._timeout_s

    def _work(
        self, outputs: Sequence[torch.Tensor], handles: Sequence[Handle], finishes: Sequence[Finish] = ()
    ) -> CollectiveWork | CompletedWork:
        """What torch gets for operations under way, or complete where there are no handles."""
        if not handles:
            for finish in finishes:
                finish()
            return CompletedWork(outputs)
        work = CollectiveWork(outputs, handles, self._completer, finishes)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _group_of(self, tensor: torch.Tensor) -> Any:
        """None where the tensor is ours, on the CPU; else the group that serves the accelerator."""
        if tensor.is_cpu:
            return None
        if self._accelerator is None:
            raise ParamError(
                f"This process group serves CPU tensors, got one on {tensor.device}. Move it to the CPU, or "
                "give every rank a GPU and leave cuda= of init_process_group as it is."
            )
        return self._accelerator


def as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What torch gives as a list, and its users sometimes as one tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def restoring(buffer: torch.Tensor, tensor: torch.Tensor) -> Finish:
    """A finish that writes back what :func:`sparkdl.torch.buffers.movable` or ``reducible`` made of a tensor."""
    return lambda: restore(buffer, tensor)
