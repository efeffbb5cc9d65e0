"""Moves batches to a GPU ahead of the training loop: through pinned memory, on a CUDA stream of its own.

Runs on a *rank*. A thread takes batches from the feed, copies them to pinned memory and starts their copy to the
device, while the loop computes on earlier ones; at most two batches wait there. Batches that may not be made on another
thread take the same way without it. On the CPU batches stay as they are:
tensors can lie over their memory.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.data.read_ahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy.typing as npt

    from sparkdl.training.model_inputs import Arrays
    from sparkdl.training.objective import Batch

_BATCHES_AHEAD = 2


def batches_for(
    device: torch.device, batches: Generator[Arrays, None, None], *, ahead: bool = True
) -> Generator[Batch, None, None]:
    """Return the batches as a step on the device takes them, in their order; whoever leaves off closes them.

    Args:
        device: of the module.
        batches: as arrays of numbers.
        ahead: whether they may be made on a thread beside the training, before it asks for them.
    """
    if device.type != "cuda":
        return batches
    return _on_gpu(device, batches) if ahead else _one_by_one(device, batches)


def _one_by_one(device: torch.device, batches: Generator[Arrays, None, None]) -> Generator[Batch, None, None]:
    with closing(batches):
        for batch in batches:
            yield {name: _pinned(array).to(device, non_blocking=True) for name, array in batch.items()}


def _on_gpu(device: torch.device, batches: Generator[Arrays, None, None]) -> Generator[Batch, None, None]:
    stream = torch.cuda.Stream(device)
    ahead = ReadAhead(_copies(device, stream, batches), _BATCHES_AHEAD, "sparkdl-device-copies")
    try:
        for tensors, copied in ahead:
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            for tensor in tensors.values():
                # Their memory is the other stream's; it must not take it back before this one is done with it.
                tensor.record_stream(current)
            yield tensors
    finally:
        ahead.close()


def _copies(
    device: torch.device, stream: torch.cuda.Stream, batches: Generator[Arrays, None, None]
) -> Generator[tuple[dict[str, Tensor], torch.cuda.Event], None, None]:
    with closing(batches):
        for batch in batches:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                tensors = {
                    name: _pinned(array).to(device, non_blocking=True) for name, array in batch.items()
                }
                copied = torch.cuda.Event()
                copied.record(stream)
            yield tensors, copied


def _pinned(array: npt.NDArray[Any]) -> Tensor:
    # torch keeps pinned memory for later use, and does not give it out before copies from it are done.
    return torch.from_numpy(np.require(array, requirements=["W"])).pin_memory()
