"""How a process group hands operations to its communicator.

Runs on the *rank*. Operations with ``asyncOp`` are queued to the communicator's progress thread; the others
run on the caller's thread before the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import export, restore
from sparkdl.torch.work import CollectiveWork, CompletedWork, FutureCompleter, seconds

if TYPE_CHECKING:
    from sparkdl.collective import Communicator, Handle

Finish = Callable[[], None]
"""Writes a result from its staging buffers to where the caller wants it."""


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
