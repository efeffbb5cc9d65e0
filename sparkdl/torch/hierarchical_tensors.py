"""The collectives of c10d for CUDA tensors on several hosts: NCCL inside each, the host's network once per byte.

Runs on the *rank*. What data-parallel and sharded training move (allreduce, and the reduce_scatter and allgather of one
tensor) goes by the groups of :class:`~sparkdl.collective.hierarchy.Hierarchy`::

    allreduce   NCCL: reduce a part to each rank ─► across: allreduce the own part ─► NCCL: spread the parts

as :mod:`sparkdl.torch.hierarchical_steps` says in detail. Everything else, what NCCL does not reduce, and blocks on
hosts with different numbers of ranks go through host memory as in :mod:`sparkdl.torch.staged_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from sparkdl.collective.deadline import Deadline
from sparkdl.torch.buffers import Reduction, as_bytes, flatten, is_flat, reduction_of, restore
from sparkdl.torch.hierarchical_steps import HierarchicalSteps
from sparkdl.torch.staged_tensors import StagedTensors, StagedWork
from sparkdl.torch.submission import as_list
from sparkdl.torch.work import seconds

if TYPE_CHECKING:
    from sparkdl.collective.hierarchy import Hierarchy
    from sparkdl.torch.gpu_lane import Lane
    from sparkdl.torch.process_group import SparkdlProcessGroup

Tensors = Sequence[torch.Tensor]

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})


class HierarchicalTensors(StagedTensors):
    """What a process group asks for tensors on its rank's GPU, on several hosts.

    Args:
        hierarchy: the groups; closed by :meth:`shutdown`. Its ``everyone`` is what ``host_group`` communicates by.
        host_group: see :class:`~sparkdl.torch.staged_tensors.StagedTensors`.
        lane: where the collectives run.
        timeout_s: deadline of a collective that names none.
    """

    def __init__(
        self, hierarchy: Hierarchy, host_group: SparkdlProcessGroup, lane: Lane, *, timeout_s: float
    ) -> None:
        super().__init__(host_group, lane, hierarchy.everyone.name)
        self._hierarchy = hierarchy
        self._timeout_s = timeout_s
        self._world_size = hierarchy.everyone.world_size
        self._steps = HierarchicalSteps(hierarchy, lane)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> StagedWork:
        """Reduce each tensor over the ranks, in place."""
        opts = AllreduceOptions() if opts is None else opts
        tensors = as_list(tensors)
        reduction = reduction_of(opts.reduceOp)
        if not all(_is_reduced_by_nccl(tensor, reduction) for tensor in tensors):
            return super().allreduce(tensors, opts)

        def communicate(stream: int, deadline: Deadline) -> None:
            flats = [flatten(tensor) for tensor in tensors]
            self._steps.allreduce(flats, **self._scaled(reduction), stream=stream, deadline=deadline)
            for flat, tensor in zip(flats, tensors, strict=True):
                restore(flat, tensor)

        return self._run(tensors, tensors, opts, communicate)

    allreduce_coalesced = allreduce

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> StagedWork:
        """Reduce the inputs over the ranks and keep this rank's block of the result in ``output``."""
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> StagedWork:
        """The same for several pairs, one after another."""
        opts = ReduceScatterOptions() if opts is None else opts
        reduction = reduction_of(opts.reduceOp)
        is_ours = all(_is_reduced_by_nccl(tensor, reduction) for tensor in inputs)
        if not (is_ours and self._hierarchy.is_even and self._fit(outputs, inputs)):
            return super().reduce_scatter_tensor_coalesced(outputs, inputs, opts)

        def communicate(stream: int, deadline: Deadline) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                block = self._steps.reduce_scatter(
                    flatten(tensor).view(self._world_size, -1),
                    **self._scaled(reduction),
                    stream=stream,
                    deadline=deadline,
                )
                output.detach().copy_(block.view(output.shape), non_blocking=True)

        return self._run(outputs, [*outputs, *inputs], opts, communicate)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> StagedWork:
        """Lay the tensors of all ranks one after another into ``output``; ``tensor`` may be a slice of it."""
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> StagedWork:
        """The same for several pairs, one after another."""
        opts = AllgatherOptions() if opts is None else opts
        if not (self._hierarchy.is_even and self._fit(inputs, outputs)):
            return super().allgather_into_tensor_coalesced(outputs, inputs, opts)

        def communicate(stream: int, deadline: Deadline) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                target = output.detach() if is_flat(output) else torch.empty_like(output).contiguous()
                blocks = as_bytes(target).view(self._world_size, -1)
                self._steps.allgather(as_bytes(tensor), blocks, stream=stream, deadline=deadline)
                restore(target, output)

        return self._run(outputs, [*outputs, *inputs], opts, communicate)

    def shutdown(self) -> None:
        """Complete what is under way and leave."""
        self._end_thread()
        self._hierarchy.close()
        super().shutdown()

    def _run(
        self, outputs: Tensors, used: Tensors, opts: Any, communicate: Callable[[int, Deadline], None]
    ) -> StagedWork:
        ready = self._lane.mark()
        timeout_s = seconds(getattr(opts, "timeout", None)) or self._timeout_s

        def in_order() -> Any:
            with self._hierarchy.one_fate(), self._lane.after(ready, used) as stream:
                communicate(stream, Deadline(timeout_s))
                return self._lane.mark()

        return self._submit(outputs, [opts], in_order)

    def _fit(self, blocks: Tensors, wholes: Tensors) -> bool:
        """Each whole has a block for every rank; what does not is left to the host's road, which says what is wrong."""
        return all(
            0 < self._world_size * block.numel() == whole.numel() and block.dtype == whole.dtype
            for block, whole in zip(blocks, wholes, strict=True)
        )

    def _scaled(self, reduction: Reduction) -> dict[str, Any]:
        """How NCCL reduces inside; an average is scaled before it is summed up, as NCCL does itself."""
        if reduction.op == "avg":
            return {"op": "sum", "prescale": reduction.prescale / self._world_size}
        return {"op": reduction.op, "prescale": reduction.prescale}


def _is_reduced_by_nccl(tensor: torch.Tensor, reduction: Reduction) -> bool:
    """NCCL and what goes across both reduce it as it is."""
    is_scaled = reduction.op == "avg" or reduction.prescale != 1.0
    return reduction.op is not None and tensor.dtype in (_FLOATS if is_scaled else _FLOATS | _INTEGERS)
