"""What every collective begins with: where it runs, what it is called, and whether its tensors can be taken."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.exceptions import HorovodInternalError
from sparkdl.horovod.torch.process_sets import ProcessSet, engine_of
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
        ValueError: if there is no such process set, it is of an earlier world, or this rank is not in it.
    """
    engine = find_engine(process_set, operation)
    return engine, name_of(engine, operation, name)


def find_engine(process_set: ProcessSet, operation: str) -> Engine:
    """The first half of :func:`find_target`, for who has something to check that needs the engine."""
    return engine_of(process_set, operation.removeprefix("Grouped_").capitalize())


def name_of(engine: Engine, operation: str, name: str | None) -> str:
    """The second half of :func:`find_target`, after which the operation must be submitted.

    A number that only this rank has taken would keep its next operation from meeting the others'.
    """
    prefix = operation.lower()
    return f"{prefix}.{name or f'noname.{engine.next_number(prefix)}'}"


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
        ValueError: if a tensor is sparse, quantized or without memory, or of another dtype.
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
    """Refuse tensors that are not what their memory holds, such as DTensors.

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
    """Check that results can be written to tensors, which :func:`check_tensors` takes.

    Raises:
        ValueError: if several elements of one lie at one place, as those of an expanded tensor do.
    """
    for output in outputs:
        if any(extent > 1 and step == 0 for extent, step in zip(output.shape, output.stride(), strict=True)):
            raise ValueError(
                f"A result cannot be written to a tensor of shape {tuple(output.shape)} and strides "
                f"{output.stride()}, several elements of which lie at one place; pass tensor.contiguous()."
            )


def new_output(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same shape, dtype and device, whose values are still to come."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
