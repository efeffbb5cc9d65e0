"""The collectives of c10d that move data without reducing it, barrier, and messages between two ranks.

Method names, arguments and return values are c10d's, under both names where torch renamed one.

* :class:`Movements`: allgather and broadcast, which give every rank the same data, and barrier.
* :class:`Exchanges`: gather, scatter and alltoall, in which ranks get different data. Distributed checkpoints use
  gather and scatter, DTensor uses alltoall.
* :class:`Messages`: send and recv, which pipelines use. They do not wait in the queue of the collectives: a message
  is sent as soon as its receiver takes it, whatever other operations are in progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparkdl.errors import ParamError
from sparkdl.patches.compiler import not_compiled
from sparkdl.torch.buffers import (
    check_dtypes,
    elements_per_element,
    export,
    movable,
    restore,
    rows_of_blocks,
)
from sparkdl.torch.futures import FutureCompleter
from sparkdl.torch.submission import (
    ALL_GATHER,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    SCATTER,
    Finish,
    Submission,
    as_list,
    recorded,
    restoring,
)
from sparkdl.torch.work import CollectiveWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Handle


@not_compiled
class Movements(Submission):
    """allgather in its forms, broadcast, and barrier, which moves nothing."""

    @recorded("all_gather", 1)
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = ALL_GATHER) -> Any:
        """Concatenate the tensors of all ranks in ``output``; ``tensor`` may be a slice of it."""
        if (other := self.accelerator_of(tensor)) is not None:
            return other._allgather_base(output, tensor, opts)
        return self._allgather_pairs([output], [tensor], opts)

    _allgather_base = all_gather_single

    @recorded("all_gather", 1)
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = ALL_GATHER
    ) -> Any:
        """:meth:`all_gather_single` for several pairs at once; none may read what another writes."""
        if inputs and (other := self.accelerator_of(inputs[0])) is not None:
            return other.allgather_into_tensor_coalesced(list(outputs), list(inputs), opts)
        return self._allgather_pairs(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather_pairs(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        world_size = self.communicator.world_size
        handles: list[Handle] = []
        finishes: list[Finish] = []
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() != tensor.numel() * world_size or output.dtype != tensor.dtype:
                raise ParamError(
                    f"allgather of {tuple(tensor.shape)} {tensor.dtype} over {world_size} ranks needs "
                    f"{tensor.numel() * world_size} such elements of output, got {tuple(output.shape)} "
                    f"{output.dtype}."
                )
            target = movable(output)
            sources, targets = groups.setdefault(target.dtype, ([], []))
            sources.append(movable(tensor))
            targets.append(target)
            finishes.append(restoring(target, output))
        for sources, targets in groups.values():
            if len(sources) == 1:
                handles += self._call("allgather", opts, sources[0], targets[0])
            else:
                handles += self._call("allgather_group", opts, sources, targets)
        return self._work(outputs, handles, finishes)

    @recorded("all_gather", 1)
    def allgather(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = ALL_GATHER,
    ) -> Any:
        """Copy the input of every rank to that rank's tensor of the list; sizes may differ between ranks."""
        for outputs, tensor in zip(output_lists, inputs, strict=True):
            check_dtypes("allgather", tensor, *outputs)
        if (other := self.accelerator_of(inputs[0])) is not None:
            return other.allgather(output_lists, inputs, opts)
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for outputs, tensor in zip(output_lists, inputs, strict=True):
            sizes = [output.numel() for output in outputs]
            rank, world_size = self.communicator.rank, self.communicator.world_size
            if len(sizes) != world_size or sizes[rank] != tensor.numel():
                raise ParamError(
                    f"allgather of {tensor.numel()} elements on rank {rank} of {world_size} does not fit "
                    f"outputs of {sizes} elements."
                )
            source = movable(tensor)
            counts = [size * elements_per_element(tensor) for size in sizes]
            target = source.new_empty(sum(counts))
            handles += self._call("allgather", opts, source, target, counts=counts)
            finishes += restoring_parts(target, outputs)
        return self._work([output for outputs in output_lists for output in outputs], handles, finishes)

    @recorded("all_gather", 1)
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = ALL_GATHER,
    ) -> Any:
        """Copy the inputs of every rank to that rank's list: ``output_lists[r][i]`` becomes input i of rank r."""
        world_size = self.communicator.world_size
        sizes = [[output.numel() for output in outputs] for outputs in output_lists]
        input_sizes = [tensor.numel() for tensor in inputs]
        if len(sizes) != world_size or any(of_rank != input_sizes for of_rank in sizes):
            raise ParamError(
                f"allgather_coalesced of inputs of {input_sizes} elements over {world_size} ranks needs as many such "
                f"lists of outputs, got lists of {sizes} elements."
            )
        for tensor, *outputs in zip(inputs, *output_lists, strict=True):
            check_dtypes("allgather_coalesced", tensor, *outputs)
        if (other := self.accelerator_of(inputs[0])) is not None:
            return other.allgather_coalesced(output_lists, inputs, opts)
        handles: list[Handle] = []
        finishes: list[Finish] = []
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor, *outputs in zip(inputs, *output_lists, strict=True):
            source = movable(tensor)
            target = source.new_empty(source.numel() * world_size)
            sources, targets = groups.setdefault(source.dtype, ([], []))
            sources.append(source)
            targets.append(target)
            finishes += restoring_parts(target, outputs)
        for sources, targets in groups.values():
            handles += self._call("allgather_group", opts, sources, targets)
        return self._work([output for outputs in output_lists for output in outputs], handles, finishes)

    @recorded("broadcast")
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = BROADCAST) -> Any:
        """Give every rank the root's tensors."""
        tensors = as_list(tensors)
        if (other := self.accelerator_of(tensors[0])) is not None:
            return other.broadcast(tensors, opts)
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for tensor in tensors:
            buffer = movable(tensor)
            handles += self._call("broadcast", opts, buffer, root=opts.rootRank)
            finishes.append(restoring(buffer, tensor))
        return self._work(tensors, handles, finishes)

    @recorded("barrier")
    def barrier(self, opts: Any = BARRIER) -> Any:
        """Return, or complete, once every rank has arrived."""
        return self._work((), self._call("barrier", opts))


def restoring_parts(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[Finish]:
    """Finishes that copy the parts of ``buffer``, laid out as by :func:`movable`, to the tensors."""
    finishes = []
    start = 0
    for tensor in tensors:
        end = start + tensor.numel() * elements_per_element(tensor)
        finishes.append(restoring(buffer[start:end], tensor))
        start = end
    return finishes


@not_compiled
class Exchanges(Submission):
    """gather, scatter and alltoall in its forms."""

    @recorded("gather", 1)
    def gather(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = GATHER,
    ) -> Any:
        """Copy the input of every rank to the root's list of tensors, all of one size."""
        tensor = inputs[0]
        check_dtypes("gather", tensor, *(output for outputs in output_lists for output in outputs))
        if (other := self.accelerator_of(tensor)) is not None:
            return other.gather(output_lists, inputs, opts)
        source = movable(tensor)
        if self.communicator.rank != opts.rootRank:
            return self._work((), self._call("gather", opts, source, None, root=opts.rootRank))
        outputs = list(output_lists[0])
        self._check_alike("gather", tensor, outputs)
        target = source.new_empty(source.numel() * self.communicator.world_size)
        handles = self._call("gather", opts, source, target, root=opts.rootRank)
        return self._work(outputs, handles, restoring_parts(target, outputs))

    @recorded("scatter", 1)
    def scatter(
        self,
        outputs: Sequence[torch.Tensor],
        input_lists: Sequence[Sequence[torch.Tensor]],
        opts: Any = SCATTER,
    ) -> Any:
        """Give every rank its entry of the root's list of tensors, all of one size."""
        output = outputs[0]
        check_dtypes("scatter", output, *(tensor for inputs in input_lists for tensor in inputs))
        if (other := self.accelerator_of(output)) is not None:
            return other.scatter(outputs, input_lists, opts)
        target = movable(output)
        source = None
        if self.communicator.rank == opts.rootRank:
            self._check_alike("scatter", output, input_lists[0])
            source = torch.cat([movable(tensor) for tensor in input_lists[0]])
        handles = self._call("scatter", opts, source, target, root=opts.rootRank)
        return self._work(outputs, handles, [restoring(target, output)])

    @recorded("all_to_all", 1)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = ALL_TO_ALL,
    ) -> Any:
        """Send block r of a tensor to rank r; split sizes count rows, and are equal if none are given."""
        check_dtypes("all_to_all_single", tensor, output)
        if (other := self.accelerator_of(tensor)) is not None:
            sizes = output_split_sizes or [], input_split_sizes or []
            return other.alltoall_base(output, tensor, *sizes, opts)
        world_size = self.communicator.world_size
        target = movable(output)
        finishes: list[Finish] = [restoring(target, output)]
        handles = self._call(
            "alltoall",
            opts,
            movable(tensor),
            target,
            send_counts=_elements_per_rank(tensor, input_split_sizes, world_size),
            receive_counts=_elements_per_rank(output, output_split_sizes, world_size),
        )
        return self._work([output], handles, finishes)

    alltoall_base = all_to_all_single

    @recorded("all_to_all", 1)
    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = ALL_TO_ALL
    ) -> Any:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it."""
        check_dtypes("alltoall", *inputs, *outputs)
        if (other := self.accelerator_of(inputs[0])) is not None:
            return other.alltoall(outputs, inputs, opts)
        sources = [movable(tensor) for tensor in inputs]
        received = [output.numel() * elements_per_element(output) for output in outputs]
        target = sources[0].new_empty(sum(received))
        handles = self._call(
            "alltoall",
            opts,
            torch.cat(sources),
            target,
            send_counts=[source.numel() for source in sources],
            receive_counts=received,
        )
        return self._work(outputs, handles, restoring_parts(target, outputs))

    def _check_alike(self, name: str, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        sizes = [other.numel() for other in others]
        if sizes != [tensor.numel()] * self.communicator.world_size:
            raise ParamError(
                f"{name} of {tensor.numel()} elements per rank over {self.communicator.world_size} ranks does "
                f"not fit the root's tensors of {sizes} elements."
            )


def _elements_per_rank(tensor: torch.Tensor, split_sizes: Sequence[int] | None, world_size: int) -> list[int]:
    """Number of elements, as :func:`movable` makes them, of each rank's block of a tensor that is split by rows."""
    per_row = tensor.numel() // max(1, tensor.shape[0]) * elements_per_element(tensor)
    return [size * per_row for size in rows_of_blocks(tensor, split_sizes, world_size)]


@not_compiled
class Messages(Submission):
    """send and recv. torch's ``isend`` and ``irecv`` call these, and its ``send`` and ``recv`` also wait for them."""

    _message_completer: FutureCompleter

    @recorded("send")
    def send(self, tensors: Sequence[torch.Tensor], destination: int, tag: int = 0) -> Any:
        """Send a tensor to a rank of the group; returns at once."""
        (tensor,) = tensors
        if (other := self.accelerator_of(tensor)) is not None:
            return other.send(tensors, destination, tag)
        handle = self.communicator.send_async(
            export(movable(tensor)), to=destination, tag=tag, timeout_s=self.timeout_s
        )
        return CollectiveWork((), (handle,), self._message_completer)

    @recorded("recv")
    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int = 0) -> Any:
        """Receive into a tensor what a rank of the group sends with this tag; returns at once."""
        (tensor,) = tensors
        if (other := self.accelerator_of(tensor)) is not None:
            return other.recv(tensors, source, tag)
        return self._recv(tensors, source, tag)

    @recorded("recvAnySource")
    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        """Receive into a tensor what any rank of the group sends with this tag; returns at once.

        The work's ``_source_rank()`` is the sender once it is complete.
        """
        (tensor,) = tensors
        if self.accelerator_of(tensor) is not None:
            raise ParamError(
                f"recv from any rank is for CPU tensors, got one on {tensor.device}: name the rank, as recv(src=...)."
            )
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Sequence[torch.Tensor], source: int | None, tag: int) -> CollectiveWork:
        (tensor,) = tensors
        buffer = movable(tensor)
        handle = self.communicator.recv_async(
            export(buffer), source=source, tag=tag, timeout_s=self.timeout_s
        )
        return CollectiveWork(
            tensors,
            (handle,),
            self._message_completer,
            (lambda: restore(buffer, tensor),),
            sender=lambda: handle.source,
        )
