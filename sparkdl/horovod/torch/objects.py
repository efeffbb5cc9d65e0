"""Python objects between ranks.

Runs on the *rank*. Objects travel pickled, between ranks that have proved that they know the job's secret.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch

from sparkdl.horovod.torch.basics import rank
from sparkdl.horovod.torch.operations.allgather import allgather
from sparkdl.horovod.torch.operations.broadcast import broadcast_
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, of any kind that cloudpickle can carry; on the root the very object.

    Args:
        obj: what the root gives; without meaning on the other ranks.
        root_rank: the rank that gives.
        name: by which the ranks match it.
        process_set: the ranks that take part.
    """
    pickled = _as_tensor(obj) if rank() == root_rank else torch.empty(0, dtype=torch.uint8)
    name = name or "broadcast_object"
    num_bytes = broadcast_(torch.tensor([pickled.numel()]), root_rank, f"{name}.sz", process_set)
    if rank() != root_rank:
        pickled = torch.empty(int(num_bytes), dtype=torch.uint8)
    broadcast_(pickled, root_rank, f"{name}.t", process_set)
    return obj if rank() == root_rank else cloudpickle.loads(pickled.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in order of ranks; they may differ in kind and size."""
    pickled = _as_tensor(obj)
    name = name or "allgather_object"
    sizes = allgather(torch.tensor([pickled.numel()]), f"{name}.sz", process_set).tolist()
    parts = allgather(pickled, f"{name}.t", process_set).split(sizes)
    return [cloudpickle.loads(part.numpy().tobytes()) for part in parts]


def _as_tensor(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
