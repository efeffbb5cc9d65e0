"""How a process group hands operations to its communicator.

Runs on the *rank*. Operations with ``asyncOp`` are queued to the communicator's progress thread; the others
run on the caller's thread before the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import as_bytes, export, flatten
from sparkdl.torch.work import CollectiveWork, FutureCompleter, seconds

if TYPE_CHECKING:
    from sparkdl.collective import Communicator, Handle

Finish = Callable[[], None]
"""Writes a result from its staging buffers to where the caller wants it."""


class Submission:
    """What every collective of a process group begins and ends with."""

    _communicator: Communicator
    _completer: FutureCompleter
    _timeout_s: float
    _accelerator: dist.ProcessGroup | None

    def _call(self, name: str, opts: Any, *buffers: torch.Tensor, **arguments: Any) -> list[Handle]:
        """Run an operation of the communicator to its end, or queue it and return its handle."""
        arguments["timeout_s"] = seconds(getattr(opts, "timeout", None)) or self._timeout_s
        arrays = [export(buffer) for buffer in buffers]
        if getattr(opts, "asyncOp", True):
            return [getattr(self._communicator, f"{name}_async")(*arrays, **arguments)]
        getattr(self._communicator, name)(*arrays, **arguments)
        return []

    def _gather_rows(
        self, tensor: torch.Tensor, width: int, opts: Any, handles: list[Handle]
    ) -> torch.Tensor:
        """Gather flat tensors of up to ``width`` elements as rows, of shape ``(world_size, width)``."""
        source = flatten(tensor)
        if source.numel() < width:
            source = torch.cat([source, source.new_zeros(width - source.numel())])
        rows = source.new_empty((self._communicator.world_size, width))
        handles += self._call("allgather", opts, as_bytes(source), as_bytes(rows))
        return rows

    def _work(
        self, outputs: Sequence[torch.Tensor], handles: list[Handle], finishes: list[Finish]
    ) -> CollectiveWork:
        return CollectiveWork(outputs, handles, finishes, completer=self._completer)

    def _group_of(self, tensor: torch.Tensor) -> Any:
        """None where the tensor is ours, on the CPU; else the group that serves the accelerator."""
        if tensor.device.type == "cpu":
            return None
        if self._accelerator is None:
            raise ParamError(
                f"This process group serves CPU tensors, got one on {tensor.device}. Move it to the CPU, or "
                "give every rank a GPU of its own."
            )
        return self._accelerator


def as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What torch gives as a list, and its users sometimes as one tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def copying(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Finish:
    """A finish that copies each source to its target, of the same shape."""

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.detach().copy_(source)

    return copy
