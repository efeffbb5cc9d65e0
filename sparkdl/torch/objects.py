"""Python objects that a rank sends to other ranks: pickled, with their tensors sent from where they are.

Objects are sent only between ranks that have proved that they know the job's secret.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.utils._pytree import tree_map_only

from sparkdl.collective.byte_exchange import broadcast_bytes
from sparkdl.errors import ParamError
from sparkdl.torch.data_parallel import broadcast_tensors

if TYPE_CHECKING:
    from sparkdl.collective import Communicator


def broadcast_object(communicator: Communicator, value: Any, name: str) -> Any:
    """Return rank 0's object, of any type that cloudpickle can pickle; rank 0 gets its own object back. Collective.

    Raises:
        ParamError: on rank 0, if the object holds DTensors.
        pickle.PicklingError: on the other ranks, if rank 0 cannot pickle the object; on rank 0 its own error.
    """
    tensors: list[torch.Tensor] = []
    content, failure = b"", None
    if communicator.rank == 0:
        try:
            content = b"1" + pickle_for_others(take_out_tensors(value, tensors))
        except Exception as error:
            content, failure = f"0{type(error).__name__}: {error}".encode(), error
    content = broadcast_bytes(communicator, content, root=0, name=name)
    if failure is not None:
        raise failure
    if content[:1] == b"0":
        raise pickle.PicklingError(f"Rank 0 could not pickle its object: {content[1:].decode()}")
    if communicator.rank != 0:
        value = put_in_tensors(cloudpickle.loads(content[1:]), tensors)
    broadcast_tensors(tensors, communicator, name)
    return value


def pickle_for_others(obj: Any) -> bytes:
    """Pickle an object for other ranks.

    Raises:
        ParamError: if it holds DTensors: their pickle has this rank's part alone, and another rank would take it for
            its own part.
    """
    file = io.BytesIO()
    _WholePickler(file, protocol=cloudpickle.DEFAULT_PROTOCOL).dump(obj)
    return file.getvalue()


class _WholePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def reducer_override(self, obj: Any) -> Any:
        refuse_shards(obj)
        return super().reducer_override(obj)


def refuse_shards(value: Any) -> None:
    """Refuse a tensor that is divided among ranks: a sharded DTensor, or a ShardedTensor of FSDP1.

    Raises:
        ParamError: if it is one.
    """
    if isinstance(value, torch.Tensor) and type(value).__name__ in ("DTensor", "ShardedTensor"):
        raise ParamError(
            f"A {type(value).__name__} of shape {tuple(value.shape)} cannot be sent to other ranks as an object: each "
            "rank has another part of it. Send value.full_tensor(), or keep the module and the optimizer themselves in "
            "a state, not their state_dict()."
        )


@dataclass(frozen=True)
class _TensorOutline:
    """Placeholder for a tensor whose values are sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def take_out_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy nested dicts, lists and tuples with placeholders for dense tensors; append the tensors to ``tensors``."""

    def take_out(tensor: torch.Tensor) -> Any:
        refuse_shards(tensor)
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor  # it is pickled
        tensors.append(tensor)
        return _TensorOutline(tuple(tensor.shape), tensor.dtype)

    return tree_map_only(torch.Tensor, take_out, value)


def put_in_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Undo :func:`take_out_tensors` with new, uninitialized tensors; append them to ``tensors``."""

    def put_in(outline: _TensorOutline) -> torch.Tensor:
        tensors.append(torch.empty(outline.shape, dtype=outline.dtype, device="cpu"))
        return tensors[-1]

    return tree_map_only(_TensorOutline, put_in, value)
