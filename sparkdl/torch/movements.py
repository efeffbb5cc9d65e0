"""The collectives of c10d that give every rank the same data, unread: allgather and broadcast. And barrier.

Runs on the *rank*. Method names, arguments and return values are c10d's, under both names where torch renamed
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, BarrierOptions, BroadcastOptions

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import elements_per_element, movable
from sparkdl.torch.submission import Finish, Submission, as_list, recorded, restoring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Handle


class Movements(Submission):
    """allgather in its forms, broadcast, and barrier, which moves nothing."""

    @recorded("all_gather", 1)
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Lay the tensors of all ranks one after another into ``output``; ``tensor`` may be a slice of it."""
        if (other := self._group_of(tensor)) is not None:
            return other._allgather_base(output, tensor, opts)
        return self._allgather_pairs([output], [tensor], opts)

    _allgather_base = all_gather_single

    @recorded("all_gather", 1)
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """:meth:`all_gather_single` for several pairs at once, none of which may read what another writes."""
        if inputs and (other := self._group_of(inputs[0])) is not None:
            return other.allgather_into_tensor_coalesced(list(outputs), list(inputs), opts)
        return self._allgather_pairs(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather_pairs(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        world_size = self._communicator.world_size
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
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy the input of every rank to that rank's tensor of the list; sizes may differ between ranks."""
        if (other := self._group_of(inputs[0])) is not None:
            return other.allgather(output_lists, inputs, opts)
        opts = AllgatherOptions() if opts is None else opts
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for outputs, tensor in zip(output_lists, inputs, strict=True):
            sizes = [output.numel() for output in outputs]
            rank, world_size = self._communicator.rank, self._communicator.world_size
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
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy the inputs of every rank to that rank's list: ``output_lists[r][i]`` becomes input i of rank r."""
        if (other := self._group_of(inputs[0])) is not None:
            return other.allgather_coalesced(output_lists, inputs, opts)
        opts = AllgatherOptions() if opts is None else opts
        world_size = self._communicator.world_size
        sizes = [[output.numel() for output in outputs] for outputs in output_lists]
        own = [tensor.numel() for tensor in inputs]
        if len(sizes) != world_size or any(of_rank != own for of_rank in sizes):
            raise ParamError(
                f"allgather_coalesced of inputs of {own} elements over {world_size} ranks needs as many such lists of"
                f" outputs, got lists of {sizes} elements."
            )
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
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Give every rank the root's tensors."""
        tensors = as_list(tensors)
        if (other := self._group_of(tensors[0])) is not None:
            return other.broadcast(tensors, opts)
        opts = BroadcastOptions() if opts is None else opts
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for tensor in tensors:
            buffer = movable(tensor)
            handles += self._call("broadcast", opts, buffer, root=opts.rootRank)
            finishes.append(restoring(buffer, tensor))
        return self._work(tensors, handles, finishes)

    @recorded("barrier")
    def barrier(self, opts: Any = None) -> Any:
        """Return, or complete, once every rank has arrived."""
        opts = BarrierOptions() if opts is None else opts
        return self._work((), self._call("barrier", opts))


def restoring_parts(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[Finish]:
    """Finishes that copy what lies in ``buffer``, as :func:`movable` lays it, to tensors of the same elements."""
    finishes = []
    start = 0
    for tensor in tensors:
        end = start + tensor.numel() * elements_per_element(tensor)
        finishes.append(restoring(buffer[start:end], tensor))
        start = end
    return finishes
