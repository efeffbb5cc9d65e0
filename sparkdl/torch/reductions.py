"""The reductions of c10d that a communicator has itself: allreduce and reduce_scatter.

Runs on the *rank*. Method names, arguments and return values are c10d's, under both names where torch renamed
one. Empty tensors take no part: every rank skips them alike.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, ReduceScatterOptions

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import as_bytes, flatten, reduction_of, restore, widen
from sparkdl.torch.submission import Finish, Submission, as_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Handle


class Reductions(Submission):
    """allreduce and reduce_scatter, of one tensor or several."""

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in place, as one operation per tensor."""
        tensors = as_list(tensors)
        if (other := self._group_of(tensors[0])) is not None:
            return other.allreduce(tensors, opts)
        opts = AllreduceOptions() if opts is None else opts
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for tensor in tensors:
            self._allreduce_one(tensor, opts, handles, finishes)
        return self._work(tensors, handles, finishes)

    allreduce_coalesced = allreduce

    def _allreduce_one(
        self, tensor: torch.Tensor, opts: Any, handles: list[Handle], finishes: list[Finish]
    ) -> None:
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
        if buffer is not tensor:
            finishes.append(lambda: restore(buffer, tensor))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Reduce the inputs over the ranks and keep this rank's block of the result in ``output``."""
        if (other := self._group_of(tensor)) is not None:
            return other._reduce_scatter_base(output, tensor, opts)
        return self._reduce_scatter_pairs(
            [output], [tensor], ReduceScatterOptions() if opts is None else opts
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """:meth:`reduce_scatter_single` for several pairs at once."""
        if inputs and (other := self._group_of(inputs[0])) is not None:
            return other.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), opts)
        return self._reduce_scatter_pairs(outputs, inputs, ReduceScatterOptions() if opts is None else opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        """Reduce the ranks' lists, of entries of one size, and keep this rank's entry in ``outputs``."""
        if (other := self._group_of(outputs[0])) is not None:
            return other.reduce_scatter(outputs, input_lists, opts)
        for inputs in input_lists:
            if len({tensor.numel() for tensor in inputs}) > 1:
                raise ParamError(
                    f"reduce_scatter needs inputs of one size, got {[t.numel() for t in inputs]} elements."
                )
        joined = [torch.cat([flatten(tensor) for tensor in inputs]) for inputs in input_lists]
        return self._reduce_scatter_pairs(outputs, joined, ReduceScatterOptions() if opts is None else opts)

    def _reduce_scatter_pairs(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_one(output, tensor, opts, handles, finishes)
        return self._work(outputs, handles, finishes)

    def _reduce_scatter_one(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: Any,
        handles: list[Handle],
        finishes: list[Finish],
    ) -> None:
        world_size = self._communicator.world_size
        if tensor.numel() != output.numel() * world_size or output.dtype != tensor.dtype:
            raise ParamError(
                f"reduce_scatter of {tuple(tensor.shape)} {tensor.dtype} over {world_size} ranks cannot fill "
                f"an output of {tuple(output.shape)} {output.dtype}: every rank gets one equal block."
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
