"""The collectives of c10d that reduce: allreduce, also of sparse tensors, reduce_scatter and reduce.

Method names, arguments and return values are c10d's, under both names where torch renamed one.

Sparse tensors are, for example, the gradients of ``nn.Embedding(sparse=True)``. As in Gloo, the ranks gather each
other's entries, because a dense reduction would add mostly zeros. The ranks must exchange the number of entries
first: the allreduce of a sparse tensor is complete when its call returns, with or without ``asyncOp``.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from sparkdl.errors import ParamError
from sparkdl.patches.compiler import not_compiled
from sparkdl.torch.buffers import (
    ELEMENT_DTYPES,
    PLAIN_OPS,
    Reduction,
    check_dtypes,
    elements_per_element,
    export,
    flatten,
    movable,
    reducible,
    reduction_of,
    restore,
)
from sparkdl.torch.submission import (
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    REDUCE,
    REDUCE_SCATTER,
    Finish,
    Submission,
    as_list,
    recorded,
    restoring,
)
from sparkdl.torch.work import CollectiveWork, CompletedWork, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Communicator, Handle


def allreduce_sparse(
    communicator: Communicator, tensor: torch.Tensor, reduction: Reduction, timeout_s: float
) -> None:
    """Add up a sparse tensor over the ranks, in place; every rank ends with the same entries, coalesced.

    Args:
        communicator: communicator of the ranks.
        tensor: tensor of layout ``torch.sparse_coo``, with the same shape, dtype and number of sparse dimensions on
            every rank.
        reduction: reduction, which is a sum or an average.
        timeout_s: deadline of each of the operations, in seconds.

    Raises:
        ParamError: if the tensor has another layout, or the reduction is another one.
        MismatchError: on every rank, if the ranks' tensors differ in shape, dtype or sparse dimensions.
    """
    if tensor.layout is not torch.sparse_coo or reduction.op not in ("sum", "avg"):
        raise ParamError(
            f"sparkdl reduces sparse tensors of layout torch.sparse_coo by SUM and AVG, got {tensor.layout} by "
            f"{reduction.op or 'a bitwise operation'}; convert it with to_dense() first"
        )
    sparse = tensor.detach().coalesce()
    shape = tuple(tensor.shape)
    what = f"sparse {sparse.dtype} of shape {shape}, {sparse.sparse_dim()} dimensions sparse"
    counts = torch.zeros(communicator.world_size, dtype=torch.int64, device="cpu")
    communicator.allgather(
        export(torch.tensor([sparse.indices().shape[1]], device="cpu")),
        export(counts),
        name=what,
        timeout_s=timeout_s,
    )
    indices = _gather(communicator, sparse.indices().t(), counts.tolist(), what, timeout_s)
    values = _gather(communicator, sparse.values(), counts.tolist(), what, timeout_s)
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()  # so that sums are rounded once
    if reduction.prescale != 1.0:
        values = values * reduction.prescale
    total = torch.sparse_coo_tensor(indices.t(), values, shape, device="cpu").coalesce()
    if reduction.op == "avg":
        is_integer = not (values.is_floating_point() or values.is_complex())
        total.values().div_(communicator.world_size, rounding_mode="trunc" if is_integer else None)
    with torch.no_grad():  # copying to a detached tensor would not change the entries of this one
        tensor.copy_(total)


def _gather(
    communicator: Communicator, rows: torch.Tensor, counts: list[int], what: str, timeout_s: float
) -> torch.Tensor:
    """The rows of all ranks; ``counts`` has the number of rows of each rank."""
    gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
    width = gathered[:1].numel() * elements_per_element(rows)
    communicator.allgather(
        export(movable(rows)),
        export(movable(gathered)),
        counts=[count * width for count in counts],
        name=what,
        timeout_s=timeout_s,
    )
    return gathered


# By hashes, which distinguish c10d's operations: looking up the objects, or reading their kinds, would take a tenth of
# the time to queue an allreduce.
_PLAIN_OPS = {hash(dist.ReduceOp(kind)): op for kind, op in PLAIN_OPS.items()}


@not_compiled
class Reductions(Submission):
    """allreduce, reduce_scatter and reduce, of one tensor or several."""

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = ALL_REDUCE) -> Any:
        """Reduce each tensor over the ranks, in place."""
        tensors = as_list(tensors)
        if len(tensors) == 1 and not profiler._is_profiler_enabled:
            work = self._allreduce_plainly(tensors[0], opts)
            if work is not None:
                return work
        return self._allreduce_any(tensors, opts, "allreduce")

    def _allreduce_plainly(self, tensor: torch.Tensor, opts: Any) -> CollectiveWork | CompletedWork | None:
        """The fast path for usual calls of :meth:`allreduce`; None if it does not apply."""
        op = _PLAIN_OPS.get(hash(opts.reduceOp))
        if (
            op is None
            or not self.serves(tensor)
            or tensor.dtype not in ELEMENT_DTYPES
            or tensor.requires_grad
            or tensor.is_neg()
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or self._coalesced is not None
        ):
            return None
        timeout_s = seconds(opts.timeout) or self.timeout_s
        if opts.asyncOp:
            handle = self.communicator.allreduce_async(export(tensor), op=op, timeout_s=timeout_s)
            return CollectiveWork((tensor,), (handle,), self._completer)
        self.communicator.allreduce(export(tensor), op=op, timeout_s=timeout_s)
        return CompletedWork((tensor,))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = ALL_REDUCE_COALESCED) -> Any:
        """Reduce each tensor over the ranks, in place, as one operation per element type."""
        return self._allreduce_any(as_list(tensors), opts, "allreduce_coalesced")

    @recorded("all_reduce")
    def _allreduce_any(self, tensors: list[torch.Tensor], opts: Any, method: str) -> Any:
        if tensors and (other := self.accelerator_of(tensors[0])) is not None:
            return getattr(other, method)(tensors, opts)
        reduction = reduction_of(opts.reduceOp)
        handles: list[Handle] = []
        finishes: list[Finish] = []
        dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                allreduce_sparse(self.communicator, tensor, reduction, self._deadline_of(opts))
        if reduction.op is None:
            finishes += [self._combine_bitwise(tensor, tensor, reduction, opts, handles) for tensor in dense]
            return self._work(tensors, handles, finishes)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in dense:
            buffer = reducible(tensor, reduction.op)
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
            finishes.append(restoring(buffer, tensor))
        for buffers in by_dtype.values():
            name, what = ("allreduce", buffers[0]) if len(buffers) == 1 else ("allreduce_group", buffers)
            handles += self._call(name, opts, what, op=reduction.op, prescale=reduction.prescale)
        return self._work(tensors, handles, finishes)

    def _combine_bitwise(
        self,
        tensor: torch.Tensor,
        output: torch.Tensor,
        reduction: Reduction,
        opts: Any,
        handles: list[Handle],
    ) -> Finish:
        """Start a bitwise reduction into ``output``, by an allgather, as communicators have no bitwise reductions."""
        assert reduction.bitwise is not None
        function, source = reduction.bitwise, movable(tensor)
        gathered = source.new_empty((self.communicator.world_size, source.numel()))
        handles += self._call("allgather", opts, source, gathered)
        return lambda: restore(reduce(function, gathered.unbind(0)), output)

    @recorded("reduce")
    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = REDUCE) -> Any:
        """Reduce over the ranks into the root's tensors; the other ranks keep theirs."""
        tensors = as_list(tensors)
        if (other := self.accelerator_of(tensors[0])) is not None:
            return other.reduce(tensors, opts)
        reduction = reduction_of(opts.reduceOp)
        is_root = self.communicator.rank == opts.rootRank
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for tensor in tensors:
            if reduction.op is None:
                output = tensor if is_root else torch.empty_like(tensor)
                finishes.append(self._combine_bitwise(tensor, output, reduction, opts, handles))
                continue
            buffer = reducible(tensor, reduction.op)
            handles += self._call(
                "reduce", opts, buffer, root=opts.rootRank, op=reduction.op, prescale=reduction.prescale
            )
            if is_root:
                finishes.append(restoring(buffer, tensor))
        return self._work(tensors, handles, finishes)

    @recorded("reduce_scatter", 1)
    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = REDUCE_SCATTER
    ) -> Any:
        """Reduce the inputs over the ranks and keep this rank's block of the result in ``output``."""
        if (other := self.accelerator_of(tensor)) is not None:
            return other._reduce_scatter_base(output, tensor, opts)
        return self._reduce_scatter_pairs([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    @recorded("reduce_scatter", 1)
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = REDUCE_SCATTER
    ) -> Any:
        """:meth:`reduce_scatter_single` for several pairs at once; none may read what another writes."""
        if inputs and (other := self.accelerator_of(inputs[0])) is not None:
            return other.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), opts)
        return self._reduce_scatter_pairs(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_pairs(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        world_size = self.communicator.world_size
        for output, tensor in zip(outputs, inputs, strict=True):
            if tensor.numel() != output.numel() * world_size or output.dtype != tensor.dtype:
                raise ParamError(
                    f"reduce_scatter of {tuple(tensor.shape)} {tensor.dtype} over {world_size} ranks cannot "
                    f"fill an output of {tuple(output.shape)} {output.dtype}: every rank gets one equal block."
                )
        counts = [[output.numel()] * world_size for output in outputs]
        return self._scatter_blocks(outputs, inputs, counts, opts)

    @recorded("reduce_scatter", 1)
    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        input_lists: Sequence[Sequence[torch.Tensor]],
        opts: Any = REDUCE_SCATTER,
    ) -> Any:
        """Reduce the ranks' lists and keep this rank's entry in ``outputs``; entries may differ in size."""
        for output, inputs in zip(outputs, input_lists, strict=True):
            check_dtypes("reduce_scatter", output, *inputs)
        if (other := self.accelerator_of(outputs[0])) is not None:
            return other.reduce_scatter(outputs, input_lists, opts)
        rank, world_size = self.communicator.rank, self.communicator.world_size
        counts = [[tensor.numel() for tensor in inputs] for inputs in input_lists]
        for output, of_ranks in zip(outputs, counts, strict=True):
            if len(of_ranks) != world_size or of_ranks[rank] != output.numel():
                raise ParamError(
                    f"reduce_scatter of entries of {of_ranks} elements does not fit {world_size} ranks and an "
                    f"output of {output.numel()} elements on rank {rank}."
                )
        joined = [torch.cat([flatten(tensor) for tensor in inputs]) for inputs in input_lists]
        return self._scatter_blocks(outputs, joined, counts, opts)

    def _scatter_blocks(
        self,
        outputs: Sequence[torch.Tensor],
        wholes: Sequence[torch.Tensor],
        counts: Sequence[Sequence[int]],
        opts: Any,
    ) -> Any:
        """Reduce tensors and give every rank its block, of the sizes in ``counts``; one operation per dtype."""
        reduction = reduction_of(opts.reduceOp)
        handles: list[Handle] = []
        finishes: list[Finish] = []
        groups: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor, list[int]]]] = {}
        for output, tensor, of_ranks in zip(outputs, wholes, counts, strict=True):
            if reduction.op is None:
                finishes.append(self._scatter_bitwise(output, tensor, of_ranks, reduction, opts, handles))
                continue
            source, block = reducible(tensor, reduction.op), reducible(output, reduction.op)
            if output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                block = torch.empty_like(block)
            per_element = source.numel() // max(1, tensor.numel())
            sizes = [count * per_element for count in of_ranks]
            groups.setdefault(source.dtype, []).append((source, block, sizes))
            finishes.append(restoring(block, output))
        for group in groups.values():
            sources, blocks, blocks_of_ranks = (list(part) for part in zip(*group, strict=True))
            options: dict[str, Any] = {"op": reduction.op, "prescale": reduction.prescale}
            if len(group) == 1:
                handles += self._call(
                    "reduce_scatter", opts, sources[0], blocks[0], counts=blocks_of_ranks[0], **options
                )
            else:
                handles += self._call(
                    "reduce_scatter_group", opts, sources, blocks, counts=blocks_of_ranks, **options
                )
        return self._work(outputs, handles, finishes)

    def _scatter_bitwise(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        reduction: Reduction,
        opts: Any,
        handles: list[Handle],
    ) -> Finish:
        combined = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        combine = self._combine_bitwise(tensor, combined, reduction, opts, handles)
        rank = self.communicator.rank
        start = sum(counts[:rank])

        def finish() -> None:
            combine()
            output.detach().copy_(combined[start : start + output.numel()].view(output.shape))

        return finish
