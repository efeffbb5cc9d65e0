"""``hvd.broadcast`` in its four forms: gives one rank's tensor to all ranks of a process set."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.current_session import session
from sparkdl.horovod.torch.engine.engine import Engine
from sparkdl.horovod.torch.engine.request import Kind, Request
from sparkdl.horovod.torch.handles import run_later, run_now
from sparkdl.horovod.torch.names import Average
from sparkdl.horovod.torch.operations.allreduce import allreduce
from sparkdl.horovod.torch.operations.preparation import (
    TensorsRequest,
    as_buffer,
    as_bytes,
    check_outputs,
    check_tensors,
    copy_back,
    describe,
    name_of,
    new_output,
    refuse_ranks_that_joined,
    run_with_gradients,
)
from sparkdl.horovod.torch.process_sets import ProcessSet, engine_of, global_process_set


class BroadcastRequest(TensorsRequest):
    """Fills an output, which may be the tensor itself, with the root's tensor."""

    _buffer: torch.Tensor | None = None

    def match(self, communicator: Communicator) -> None:
        """Broadcast the tensor; if it is on a device, gather a one from every rank."""
        if self._device is not None:
            self._gather(communicator, ())
        else:
            self._broadcast(communicator)

    def _broadcast(self, communicator: Communicator) -> None:
        root = self.description.root
        if self._buffer is None:
            self._stream_point.wait()
            if self._outputs[0] is not self._tensors[0] and communicator.rank == root:
                self._outputs[0].detach().copy_(self._tensors[0].detach())
            self._buffer = as_buffer(self._outputs[0])
        communicator.broadcast(as_bytes(self._buffer), root=root, name=self.label)

    def complete(self, communicator: Communicator) -> None:
        """Broadcast a tensor on a device; fill an output that could not be written to in place."""
        if self._device is not None:
            refuse_ranks_that_joined(Kind.BROADCAST, self._given)
            if (route := self._route(communicator)) is not None:
                root, follow = self.description.root, self._stream_point.follow
                self._arrival = route.broadcast(self._tensors[0], self._outputs[0], root, follow)
                return
            self._broadcast(communicator)
        if self._buffer is not None:
            copy_back(self._buffer, self._outputs[0])
            self._buffer = None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor as a new tensor; the argument keeps its values.

    The gradient on the root is the average over the ranks; on the other ranks it is zero, as in Horovod.

    Args:
        tensor: tensor of the same shape and dtype on every rank.
        root_rank: rank that sends, by its number among all ranks.
        name: name under which the ranks match the operation; numbered in the order of submission if None.
        process_set: ranks that take part.

    Raises:
        HorovodInternalError: on all ranks, if they disagree about the tensor or the root, or a rank has joined.
        ValueError: if the root is not in the process set.
    """

    def pull_back(grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        grad = allreduce(grads[0], op=Average, process_set=process_set)
        return [grad if session().world.rank == root_rank else torch.zeros_like(grad)]

    (received,) = run_with_gradients(
        [tensor],
        lambda sent: _request(sent[0], new_output(sent[0]), root_rank, name, process_set),
        pull_back,
    )
    return received


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite a tensor with the root's and return it; see :func:`broadcast`."""
    return run_now(*_request(tensor, tensor, root_rank, name, process_set))


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`broadcast`, without gradients; ``synchronize`` returns a new tensor."""
    return run_later(*_request(tensor, new_output(tensor), root_rank, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`broadcast_`; ``synchronize`` returns the same tensor, overwritten."""
    return run_later(*_request(tensor, tensor, root_rank, name, process_set))


def _request(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> tuple[Engine, Request[torch.Tensor]]:
    check_tensors([tensor])
    check_outputs([output])
    engine = engine_of(process_set, "Broadcast")
    members = session().ranks_of[process_set.process_set_id or 0]
    if root_rank not in members:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set")
    root = members.index(root_rank)
    full_name = name_of(engine, "Broadcast", name)
    description = describe(Kind.BROADCAST, full_name, [tensor], root=root, root_rank=root_rank)
    return engine, BroadcastRequest(description, [tensor], [output])
