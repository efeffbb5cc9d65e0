"""Copies batches to a GPU ahead of the training loop, through pinned memory and on a separate CUDA stream.

A thread takes batches from the feed, copies them to pinned memory and starts their copy to the device, while the loop
computes on earlier ones; the total size of the waiting batches is limited. Batches that must not be made on another
thread take the same path without it. On the CPU batches stay as they are: tensors can share their memory.

:func:`read_timeout_s` returns how long a rank waits for a row group. :func:`single_rows_allowed` is for batches of one
row in models with BatchNorm; the last step of an epoch may have such a batch.
"""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.data.files.threads import READ_AHEAD_BYTES, ReadAhead

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from sparkdl.collective import Communicator
    from sparkdl.model.inputs import Arrays
    from sparkdl.training.objective import Batch


Copy: TypeAlias = tuple[dict[str, Tensor], Any]
"""A batch on the device, and the CUDA event that completes when the copy is done."""

_MAX_BATCHES_AHEAD = 8
_AHEAD_BYTES = READ_AHEAD_BYTES // 4
"""Maximum bytes in pinned memory of batches that wait or are being copied; they take as much on the device."""


def batches_for(
    device: torch.device, batches: Generator[Arrays, None, None], *, ahead: bool = True
) -> Generator[Batch, None, None]:
    """Return the batches in their order, on the device; a consumer that stops early has to close the generator.

    Args:
        device: device of the module.
        batches: batches as arrays of numbers.
        ahead: whether batches may be made ahead, on a thread beside the training.
    """
    if device.type != "cuda":
        return batches
    return _on_gpu(device, batches, ahead)


def most_batches_ahead(device: torch.device, *, ahead: bool = True) -> int:
    """Return how many batches :func:`batches_for` may have taken beyond those that it has returned."""
    return _MAX_BATCHES_AHEAD + 1 if device.type == "cuda" and ahead else 0


def copy_ahead(copies: Generator[Copy, None, None], max_bytes: int = _AHEAD_BYTES) -> ReadAhead[Copy]:
    """Copy batches in a separate thread: as many ahead as fit into ``max_bytes``, at least one."""
    return ReadAhead(
        copies,
        _MAX_BATCHES_AHEAD,
        "sparkdl-device-copies",
        max_bytes=max_bytes,
        bytes_of=lambda copy: sum(tensor.nbytes for tensor in copy[0].values()),
    )


def _on_gpu(
    device: torch.device, batches: Generator[Arrays, None, None], ahead: bool
) -> Generator[Batch, None, None]:
    copies = _copies(device, torch.cuda.Stream(device), batches)
    with closing(copy_ahead(copies) if ahead else copies) as ready:
        for tensors, copied in ready:
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            for tensor in tensors.values():
                # The memory belongs to the copying stream, which must not reuse it before this stream is done with it.
                tensor.record_stream(current)
            yield tensors


def _copies(
    device: torch.device, stream: torch.cuda.Stream, batches: Generator[Arrays, None, None]
) -> Generator[Copy, None, None]:
    with closing(batches):
        for batch in batches:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                # torch caches pinned memory, and does not reuse it before copies from it are done.
                tensors = {
                    name: torch.from_numpy(np.require(array, requirements=["W"]))
                    .pin_memory()
                    .to(device, non_blocking=True)
                    for name, array in batch.items()
                }
                copied = torch.cuda.Event()
                copied.record(stream)
            yield tensors, copied


_MOST_S = 600.0


def read_timeout_s(communicator: Communicator) -> float:
    """Return the seconds to wait for a row group: half of the communicator's timeout, at most 600.

    While a rank reads, the other ranks wait for it in a collective. It has to give up before they do, as only this
    rank can report which file it waits for.
    """
    return min(_MOST_S, communicator.timeout_s / 2)


@contextmanager
def single_rows_allowed(module: nn.Module) -> Iterator[None]:
    """Within this context a BatchNorm that gets one value per channel normalizes it by its running statistics.

    One value has no variance, and torch refuses it in training. A fit has to work for any number of rows, and dropping
    the row would leave it out of the training. Layers that normalize over ranks (SyncBatchNorm) handle this themselves.
    """
    frozen: set[nn.Module] = set()

    def freeze_for_one_value(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        values = inputs[0]
        if layer.training and isinstance(values, Tensor) and values.numel() == values.shape[1]:
            layer.training = False
            frozen.add(layer)

    def thaw(layer: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        del inputs, output
        if layer in frozen:
            layer.training = True
            frozen.discard(layer)

    with ExitStack() as stack:
        for layer in module.modules():
            if (
                isinstance(layer, _BatchNorm)
                and not isinstance(layer, nn.SyncBatchNorm)
                and not hasattr(layer, "counts_rows")  # sparkdl's CrossRankBatchNorm
                and layer.track_running_stats
            ):
                stack.callback(layer.register_forward_pre_hook(freeze_for_one_value).remove)
                stack.callback(layer.register_forward_hook(thaw, always_call=True).remove)
        yield
