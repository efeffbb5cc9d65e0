"""What every collective begins with: where it runs, what it is called, and whether its tensors can be taken."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from sparkdl.horovod.torch.current_session import engine_for
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.exceptions import HorovodInternalError
from sparkdl.horovod.torch.process_sets import ProcessSet
from sparkdl.horovod.torch.reduce_ops import Average
from sparkdl.horovod.torch.requests.host_memory import AVERAGED_DTYPES, REDUCED_DTYPES


def find_target(process_set: ProcessSet, operation: str, name: str | None) -> tuple[Engine, str]:
    """The engine of a process set, and the name by which the ranks match an operation.

    Args:
        process_set: where the operation runs.
        operation: what Horovod's errors call it, such as ``"Allreduce"``; in lower case it begins the name.
        name: what the caller calls it; numbered in the order of submission if it has none.

    Raises:
        HorovodInternalError: if ``init`` has not been called.
        ValueError: if there is no such process set, or this rank is not in it.
    """
    engine = engine_for(process_set.process_set_id, operation.removeprefix("Grouped_").capitalize())
    prefix = operation.lower()
    return engine, f"{prefix}.{name or f'noname.{engine.next_number(prefix)}'}"


def check_reducible(tensors: Sequence[torch.Tensor], op: int) -> None:
    """Check that tensors can be reduced by an operation: here, as what fails on its way ends the session.

    Raises:
        ValueError: if a tensor is sparse, or of a dtype that the operation is not made for.
        HorovodInternalError: if they are not on one device.
    """
    check_tensors(tensors, AVERAGED_DTYPES if op == Average else REDUCED_DTYPES)


def check_tensors(tensors: Sequence[torch.Tensor], dtypes: Collection[torch.dtype] | None = None) -> None:
    """Check that tensors can be communicated.

    Args:
        tensors: strided, all on one device.
        dtypes: those allowed; any if None.

    Raises:
        ValueError: if a tensor is sparse, or of another dtype.
        HorovodInternalError: if they are not on one device.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided or (dtypes is not None and tensor.dtype not in dtypes):
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if len({tensor.device for tensor in tensors}) > 1:
        raise HorovodInternalError("Tensors in list must be on same device.")


def new_output(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same shape, dtype and device, whose values are still to come."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
