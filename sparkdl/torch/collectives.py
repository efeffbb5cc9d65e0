"""The collectives of c10d that a communicator has itself: allreduce, reduce_scatter, allgather, broadcast, barrier.

Runs on the *rank*. Method names, arguments and return values are c10d's, under both of the names that torch has used
where it renamed one. Operations with ``asyncOp`` are queued to the communicator's progress thread; the others run on
the caller's thread before the call returns. Empty tensors take no part: every rank skips them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collective import Communicator
from sparkdl.errors import ParamError
from sparkdl.torch.buffers import as_bytes, flatten, is_flat, reduction_of, restore, widen
from sparkdl.torch.work import CollectiveWork, FutureCompleter, Handle, seconds

Finish = Callable[[], None]


class NativeCollectives:
    """The part of the process group that maps tensors on the communicator's buffers and operations."""

    _communicator: Communicator
    _completer: FutureCompleter
    _timeout_s: float
    _accelerator: dist.ProcessGroup | None

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in place, as one operation per tensor."""
        tensors = _as_list(tensors)
        if (other := self._group_of(tensors[0])) is not None:
            return other.allreduce(tensors, opts)
        opts = dist.AllreduceOptions() if opts is None else opts
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for tensor in tensors:
            self._allreduce_one(tensor, opts, handles, finishes)
        return self._work(tensors, handles, finishes)

    allreduce_coalesced = allreduce

    def _allreduce_one(self, tensor: torch.Tensor, opts: Any, handles: list[Handle], finishes: list[Finish]) -> None:
        if tensor.numel() == 0:
            return
        reduction = reduction_of(opts.reduceOp)
        if reduction.op is None:
            assert reduction.bitwise is not None
            function, source = reduction.bitwise, flatten(tensor)
            gathered = source.new_empty((self._communicator.world_size, source.numel()))
            handles += self._call("allgather", opts, as_bytes(source), as_bytes(gathered))
            finishes.append(lambda: restore(reduce(function, gathered.unbind(0)), tensor))
            return
        buffer = widen(tensor, reduction.op)
        if reduction.factor is not None:
            buffer.mul_(reduction.factor)
        handles += self._call("allreduce", opts, buffer, op=reduction.op)
        finishes.append(lambda: restore(buffer, tensor))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Lay the inputs of all ranks one after another into ``output``; ``input`` may be this rank's slice of it."""
        if (other := self._group_of(input)) is not None:
            return other._allgather_base(output, input, opts)
        return self._allgather_pairs([output], [input], dist.AllgatherOptions() if opts is None else opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """:meth:`all_gather_single` for several pairs at once."""
        if inputs and (other := self._group_of(inputs[0])) is not None:
            return other.allgather_into_tensor_coalesced(list(outputs), list(inputs), opts)
        return self._allgather_pairs(outputs, inputs, dist.AllgatherOptions() if opts is None else opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather_pairs(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> Any:
        world_size = self._communicator.world_size
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() != tensor.numel() * world_size or output.dtype != tensor.dtype:
                raise ParamError(
                    f"allgather of {tuple(tensor.shape)} {tensor.dtype} over {world_size} ranks needs an output of "
                    f"{tensor.numel() * world_size} such elements, got {tuple(output.shape)} {output.dtype}."
                )
            if tensor.numel() == 0:
                continue
            target = output if is_flat(output) else torch.empty(output.shape, dtype=output.dtype)
            handles += self._call("allgather", opts, as_bytes(tensor), as_bytes(target))
            if target is not output:
                finishes.append(_copying([output], [target]))
        return self._work(outputs, handles, finishes)

    def allgather(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy the input of every rank to that rank's tensor of the list; the sizes may differ between ranks."""
        if (other := self._group_of(inputs[0])) is not None:
            return other.allgather(output_lists, inputs, opts)
        opts = dist.AllgatherOptions() if opts is None else opts
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for outputs, tensor in zip(output_lists, inputs, strict=True):
            sizes = [output.numel() for output in outputs]
            if len(sizes) != self._communicator.world_size or sizes[self._communicator.rank] != tensor.numel():
                raise ParamError(
                    f"allgather of {tensor.numel()} elements on rank {self._communicator.rank} of "
                    f"{self._communicator.world_size} does not fit outputs of {sizes} elements."
                )
            if max(sizes) == 0:
                continue
            gathered = self._gather_rows(tensor, max(sizes), opts, handles)
            parts = [row[:size].view(output.shape) for row, size, output in zip(gathered, sizes, outputs, strict=True)]
            finishes.append(_copying(outputs, parts))
        return self._work([output for outputs in output_lists for output in outputs], handles, finishes)

    allgather_coalesced = allgather

    def _gather_rows(self, tensor: torch.Tensor, width: int, opts: Any, handles: list[Handle]) -> torch.Tensor:
        """Gather flat tensors of up to ``width`` elements as rows, of shape ``(world_size, width)``."""
        source = flatten(tensor)
        if source.numel() < width:
            source = torch.cat([source, source.new_zeros(width - source.numel())])
        rows = source.new_empty((self._communicator.world_size, width))
        handles += self._call("allgather", opts, as_bytes(source), as_bytes(rows))
        return rows

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Reduce the inputs over the ranks and keep this rank's block of the result in ``output``."""
        if (other := self._group_of(input)) is not None:
            return other._reduce_scatter_base(output, input, opts)
        return self._reduce_scatter_pairs([output], [input], dist.ReduceScatterOptions() if opts is None else opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """:meth:`reduce_scatter_single` for several pairs at once."""
        if inputs and (other := self._group_of(inputs[0])) is not None:
            return other.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), opts)
        return self._reduce_scatter_pairs(outputs, inputs, dist.ReduceScatterOptions() if opts is None else opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        """Reduce the ranks' lists and keep this rank's entry of the result in ``outputs``; entries are of one size."""
        if (other := self._group_of(outputs[0])) is not None:
            return other.reduce_scatter(outputs, input_lists, opts)
        for inputs in input_lists:
            if len({tensor.numel() for tensor in inputs}) > 1:
                raise ParamError(f"reduce_scatter needs inputs of one size, got {[t.numel() for t in inputs]} elements.")
        joined = [torch.cat([flatten(tensor) for tensor in inputs]) for inputs in input_lists]
        return self._reduce_scatter_pairs(outputs, joined, dist.ReduceScatterOptions() if opts is None else opts)

    def _reduce_scatter_pairs(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> Any:
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_one(output, tensor, opts, handles, finishes)
        return self._work(outputs, handles, finishes)

    def _reduce_scatter_one(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any, handles: list[Handle], finishes: list[Finish]
    ) -> None:
        world_size = self._communicator.world_size
        if tensor.numel() != output.numel() * world_size or output.dtype != tensor.dtype:
            raise ParamError(
                f"reduce_scatter of {tuple(tensor.shape)} {tensor.dtype} over {world_size} ranks cannot fill an output "
                f"of {tuple(output.shape)} {output.dtype}: every rank gets one equal block."
            )
        if tensor.numel() == 0:
            return
        reduction = reduction_of(opts.reduceOp)
        if reduction.op is None:
            assert reduction.bitwise is not None
            function, rank = reduction.bitwise, self._communicator.rank
            rows = self._gather_rows(tensor, tensor.numel(), opts, handles)
            blocks = rows.view(world_size, world_size, -1)[:, rank]
            finishes.append(lambda: restore(reduce(function, blocks.unbind(0)), output))
            return
        buffer = widen(tensor, reduction.op)
        if reduction.factor is not None:
            buffer = buffer * reduction.factor
        block = widen(output, reduction.op)
        if output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            block = torch.empty_like(block)
        handles += self._call("reduce_scatter", opts, buffer, block, op=reduction.op)
        finishes.append(lambda: restore(block, output))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Give every rank the root's tensors."""
        tensors = _as_list(tensors)
        if (other := self._group_of(tensors[0])) is not None:
            return other.broadcast(tensors, opts)
        opts = dist.BroadcastOptions() if opts is None else opts
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            buffer = tensor if is_flat(tensor) else tensor.detach().clone(memory_format=torch.contiguous_format)
            handles += self._call("broadcast", opts, as_bytes(buffer), root=opts.rootRank)
            if buffer is not tensor:
                finishes.append(_copying([tensor], [buffer]))
        return self._work(tensors, handles, finishes)

    def barrier(self, opts: Any = None) -> Any:
        """Return, or complete, once every rank has arrived."""
        opts = dist.BarrierOptions() if opts is None else opts
        return self._work([], self._call("barrier", opts), [])

    def _call(self, name: str, opts: Any, *buffers: torch.Tensor, **arguments: Any) -> list[Handle]:
        """Run an operation of the communicator to its end, or queue it and return its handle."""
        timeout_s = seconds(getattr(opts, "timeout", None)) or self._timeout_s
        if getattr(opts, "asyncOp", True):
            return [getattr(self._communicator, f"{name}_async")(*buffers, timeout_s=timeout_s, **arguments)]
        getattr(self._communicator, name)(*buffers, timeout_s=timeout_s, **arguments)
        return []

    def _work(self, outputs: Sequence[torch.Tensor], handles: list[Handle], finishes: list[Finish]) -> CollectiveWork:
        return CollectiveWork(outputs, handles, finishes, completer=self._completer)

    def _group_of(self, tensor: torch.Tensor) -> Any:
        """None where the tensor is ours, on the CPU; else the group that serves the accelerator."""
        if tensor.device.type == "cpu":
            return None
        if self._accelerator is None:
            raise ParamError(
                f"This process group serves CPU tensors, got one on {tensor.device}. Move it to the CPU, or give every "
                f"rank a GPU of its own."
            )
        return self._accelerator


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _copying(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Finish:
    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.detach().copy_(source)

    return copy
