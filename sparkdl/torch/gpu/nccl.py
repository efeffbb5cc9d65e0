"""The collectives of c10d for CUDA tensors over sparkdl's own NCCL group, and the ``Work`` that they return.

Method names, arguments and return values are c10d's. The ``timeout`` of a collective counts from its call: if the GPU
has not completed it by then, the group fails. A thread of the group checks this, as NCCL has no deadlines.
``Work.wait`` does not block the host, so it ignores its own timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparkdl.collective.buffers import DeviceArray
from sparkdl.errors import ParamError
from sparkdl.torch.buffers import as_bytes, flatten, is_flat, reduction_of, rows_of_blocks
from sparkdl.torch.submission import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    OwnAccelerator,
    as_list,
)
from sparkdl.torch.work import CompletedWork, KeptWork, UnawaitedWorks, seconds

if TYPE_CHECKING:
    from datetime import timedelta

    from sparkdl.collective.nccl.group import NcclBatch, NcclGroup, NcclHandle
    from sparkdl.errors import CommunicatorError, SparkdlError
    from sparkdl.torch.gpu.lanes import GpuLane


class NcclWork(KeptWork):
    """A collective that is on a stream.

    As with torch's own NCCL, ``wait`` makes the caller's stream wait, not the host. If a collective fails on the GPU,
    the next call fails, and the results of the collective are invalid.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        unawaited: UnawaitedWorks,
        group: NcclGroup,
        handle: NcclHandle,
        lane: GpuLane,
        mark: Any,
    ) -> None:
        super().__init__(outputs, unawaited)
        self._group = group
        self._handle: NcclHandle | None = handle  # it keeps the inputs, too; None once they are released
        self._lane = lane
        self._mark = mark  # of copies after the collective; None if there are none
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - c10d's argument; the host never waits
        """Make the current stream wait until the outputs hold the result.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        self.is_awaited = True
        if self._mark is not None or self._handle is None:
            self._group.check()
        if self._mark is not None:
            self._lane.join(self._mark)
        elif self._handle is not None:
            self._handle.join(self._lane.streams(asynchronous=False)[0])
        return True

    def is_completed(self) -> bool:
        """Whether the GPU has completed the collective, or the group has failed."""
        return self._handle is None or self.exception() is not None or self._handle.done()

    def release(self) -> bool:
        """Drop the tensors if the GPU has completed the collective; return whether they were dropped."""
        if not super().release():
            return False
        self._handle = None
        return True

    def exception(self) -> SparkdlError | None:
        """The error of the group, or None."""
        return self._group.error()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors; the streams of its waiters wait as in ``wait``."""
        if self._future is None:
            self._future = self._lane.new_future()
            with self._lane.beside(self._outputs, asynchronous=True):
                self.wait()
                self._future.set_result(self.result())
        return self._future


Tensors = Sequence[torch.Tensor]
Finish = Callable[[], object]


class _NcclOperation(NamedTuple):
    """One operation of c10d: its options, the tensors that it uses and returns, and what it adds to a batch."""

    opts: Any
    used: Tensors
    outputs: Tensors
    add: Callable[[NcclBatch, list[Finish]], None]


# NCCL does not reduce these; truncating the wider sum gives the result of wrapping arithmetic.
_WIDER_DTYPE = {torch.int16: torch.int32, torch.uint16: torch.int32}


class NcclAccelerator(OwnAccelerator):
    """The accelerator over an NCCL group of sparkdl's own.

    Args:
        group: NCCL group of the same ranks; closed by :meth:`shutdown`.
        lane: lane on which the collectives run.
        timeout_s: default deadline of a collective, in seconds.
    """

    def __init__(self, group: NcclGroup, lane: GpuLane, *, timeout_s: float) -> None:
        super().__init__()
        self._group = group
        self._lane = lane
        self._timeout_s = timeout_s
        self._unawaited = UnawaitedWorks()

    @property
    def failure(self) -> CommunicatorError | None:
        """The error of the group, or None."""
        return self._group.error()

    def allreduce(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> NcclWork | CompletedWork:
        """Reduce each tensor over the ranks, in place, as one operation."""
        tensors = as_list(tensors)

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for tensor in tensors:
                buffer, arguments = _prepare(tensor, opts)
                batch.allreduce(describe_tensor(buffer), **arguments)
                _restore(buffer, tensor, finishes)

        return self._run(opts, tensors, tensors, add)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = REDUCE) -> NcclWork | CompletedWork:
        """Reduce over the ranks into the root's tensors; the other ranks keep theirs."""
        tensors = as_list(tensors)

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for tensor in tensors:
                buffer, arguments = _prepare(tensor, opts)
                batch.reduce(describe_tensor(buffer), root=opts.rootRank, **arguments)
                if self._group.rank == opts.rootRank:
                    _restore(buffer, tensor, finishes)

        return self._run(opts, tensors, tensors, add)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = REDUCE_SCATTER
    ) -> NcclWork | CompletedWork:
        """The reduce_scatter of several pairs, as one operation."""

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                source, arguments = _prepare(tensor, opts)
                fits = is_flat(output) and source.dtype == output.dtype
                block = output if fits else source.new_empty(source.numel() // self._group.world_size)
                batch.reduce_scatter(describe_tensor(source), describe_tensor(block), **arguments)
                _restore(block, output, finishes)

        return self._run(opts, [*outputs, *inputs], outputs, add)

    def reduce_scatter(
        self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = REDUCE_SCATTER
    ) -> NcclWork | CompletedWork:
        """Reduce the ranks' lists, whose entries have one size, and keep this rank's entry in ``outputs``."""
        joined = [torch.cat([flatten(tensor) for tensor in inputs]) for inputs in input_lists]
        return self.reduce_scatter_tensor_coalesced(outputs, joined, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_GATHER
    ) -> NcclWork | CompletedWork:
        """The allgather of several pairs, as one operation."""

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                target = _writable(output, finishes)
                batch.allgather(describe_tensor(as_bytes(tensor)), describe_tensor(as_bytes(target)))

        return self._run(opts, [*outputs, *inputs], outputs, add)

    def allgather(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = ALL_GATHER
    ) -> NcclWork | CompletedWork:
        """Copy the input of every rank to that rank's tensor of the list; sizes may differ between ranks."""
        every_output = [output for outputs in output_lists for output in outputs]

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for outputs, tensor in zip(output_lists, inputs, strict=True):
                outputs[self._group.rank].detach().copy_(tensor)
                for root, output in enumerate(outputs):
                    buffer = _writable(output, finishes, keep=root == self._group.rank)
                    batch.broadcast(describe_tensor(as_bytes(buffer)), root=root)

        return self._run(opts, [*every_output, *inputs], every_output, add)

    def broadcast(self, tensors: Tensors, opts: Any = BROADCAST) -> NcclWork | CompletedWork:
        """Give every rank the root's tensors."""
        tensors = as_list(tensors)

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for tensor in tensors:
                buffer = _writable(tensor, finishes, keep=self._group.rank == opts.rootRank)
                batch.broadcast(describe_tensor(as_bytes(buffer)), root=opts.rootRank)

        return self._run(opts, tensors, tensors, add)

    def gather(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = GATHER
    ) -> NcclWork | CompletedWork:
        """Copy the input of every rank to the root's list of tensors."""
        is_root = self._group.rank == opts.rootRank
        outputs = list(output_lists[0]) if is_root else []

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            batch.send(describe_tensor(as_bytes(inputs[0])), to=opts.rootRank)
            for source, output in enumerate(outputs):
                batch.recv(describe_tensor(as_bytes(_writable(output, finishes))), source=source)

        return self._run(opts, [*outputs, *inputs], outputs, add)

    def scatter(
        self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = SCATTER
    ) -> NcclWork | CompletedWork:
        """Give every rank its entry of the root's list of tensors."""
        inputs = list(input_lists[0]) if self._group.rank == opts.rootRank else []

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for rank, tensor in enumerate(inputs):
                batch.send(describe_tensor(as_bytes(tensor)), to=rank)
            batch.recv(describe_tensor(as_bytes(_writable(outputs[0], finishes))), source=opts.rootRank)

        return self._run(opts, [*outputs, *inputs], outputs, add)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_TO_ALL) -> NcclWork | CompletedWork:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it."""

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for rank, (output, tensor) in enumerate(zip(outputs, inputs, strict=True)):
                if tensor.numel():
                    batch.send(describe_tensor(as_bytes(tensor)), to=rank)
                if output.numel():
                    batch.recv(describe_tensor(as_bytes(_writable(output, finishes))), source=rank)

        return self._run(opts, [*outputs, *inputs], outputs, add)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = ALL_TO_ALL,
    ) -> NcclWork | CompletedWork:
        """Send block r of a tensor to rank r; split sizes count rows, and are equal if none are given."""
        return self.alltoall(
            self._blocks(output, output_split_sizes), self._blocks(tensor, input_split_sizes), opts
        )

    def send(self, tensors: Tensors, to: int, _tag: int = 0) -> NcclWork | CompletedWork:
        """Send tensors to a rank. NCCL has no tags: messages between two ranks arrive in the order of sending.

        A message that is larger than NCCL's buffers occupies the group's stream until it is received.
        """
        tensors = as_list(tensors)

        def add(batch: NcclBatch, _: list[Finish]) -> None:
            for tensor in tensors:
                batch.send(describe_tensor(as_bytes(tensor)), to=to)

        return self._run(None, tensors, tensors, add)

    def recv(self, tensors: Tensors, source: int, _tag: int = 0) -> NcclWork | CompletedWork:
        """Receive tensors from a rank."""
        tensors = as_list(tensors)

        def add(batch: NcclBatch, finishes: list[Finish]) -> None:
            for tensor in tensors:
                batch.recv(describe_tensor(as_bytes(_writable(tensor, finishes))), source=source)

        return self._run(None, tensors, tensors, add)

    def abort(self) -> None:
        """Make every collective fail, here and on the other ranks."""
        self._group.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Complete the collectives in progress and close the group."""
        self._group.close()
        self._unawaited.close()

    def _end_coalescing(self, _: torch.device) -> NcclWork | None:
        """Start all operations since :meth:`_start_coalescing` together; None if there was none."""
        operations, self._coalesced.items = self._coalesced.items, None
        return self._run_together(operations) if operations else None

    def _run(
        self, opts: Any, used: Tensors, outputs: Tensors, add: Callable[[NcclBatch, list[Finish]], None]
    ) -> NcclWork | CompletedWork:
        """Put the operations that ``add`` adds on a stream, with the copies before and after them."""
        operation = _NcclOperation(opts, used, outputs, add)
        if self._coalesced.items is None:
            return self._run_together([operation])
        self._coalesced.items.append(operation)
        return CompletedWork(outputs)  # which torch drops: it waits for the work of all coalesced operations

    def _run_together(self, operations: Sequence[_NcclOperation]) -> NcclWork:
        first, *others = operations
        timeout_s = max(
            seconds(getattr(operation.opts, "timeout", None)) or self._timeout_s for operation in operations
        )
        asynchronous = any(getattr(operation.opts, "asyncOp", True) for operation in operations)
        finishes: list[Finish] = []
        batch = self._group.batch()
        for operation in operations:
            operation.add(batch, finishes)
        stream, current = self._lane.streams(asynchronous=asynchronous)
        handle = batch.run(stream=stream, after=current, timeout_s=timeout_s)
        self._lane.order(handle)
        if stream != current:
            self._lane.keep([array.owner for array in handle.arrays])
        mark = None
        if finishes or self._lane.is_capturing():
            # Torch's own events, as the copies are torch's, and a graph holds no events of operations.
            used = [tensor for operation in operations for tensor in operation.used]
            with self._lane.on_side(used) if asynchronous else nullcontext():
                for finish in finishes:
                    finish()
                mark = self._lane.mark()
        outputs = [*first.outputs, *(tensor for operation in others for tensor in operation.outputs)]
        return NcclWork(outputs, self._unawaited, self._group, handle, self._lane, mark)

    def _blocks(self, tensor: torch.Tensor, sizes: Sequence[int] | None) -> Tensors:
        return list(tensor.split(rows_of_blocks(tensor, sizes, self._group.world_size)))


def _prepare(tensor: torch.Tensor, opts: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The elements of a tensor in a form that NCCL reduces, a view if possible, and the arguments of the reduction."""
    reduction = reduction_of(opts.reduceOp)
    if reduction.op is None:
        raise ParamError(
            "NCCL has no bitwise reductions. Reduce on the CPU, or use SUM, AVG, MIN, MAX or PRODUCT."
        )
    arguments = {"op": reduction.op, "prescale": reduction.prescale}
    flat = flatten(tensor)
    if flat.is_complex() and reduction.op in ("sum", "avg"):
        return flatten(torch.view_as_real(flat)), arguments
    wider = _WIDER_DTYPE.get(flat.dtype)
    return flat if wider is None else flat.to(wider), arguments


def _restore(buffer: torch.Tensor, tensor: torch.Tensor, finishes: list[Finish]) -> None:
    """Append a finish that copies a buffer made by :func:`_prepare` back to its tensor, unless it is a view of it."""
    if buffer.data_ptr() == tensor.data_ptr() and is_flat(tensor):
        return

    def restore() -> None:
        values = torch.view_as_complex(buffer.view(-1, 2)) if tensor.is_complex() else buffer
        tensor.detach().copy_(values.view(tensor.shape))

    finishes.append(restore)


def _writable(tensor: torch.Tensor, finishes: list[Finish], *, keep: bool = False) -> torch.Tensor:
    """The tensor itself if NCCL can write to it, else a buffer that a finish copies back from.

    Args:
        tensor: tensor for the result.
        finishes: list to which the copy back is appended.
        keep: whether the buffer starts with the tensor's values.
    """
    if is_flat(tensor):
        return tensor.detach()
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if keep:
        buffer.copy_(tensor)
    finishes.append(lambda: tensor.detach().copy_(buffer))
    return buffer


def describe_tensor(tensor: torch.Tensor) -> DeviceArray:
    """The description of a contiguous tensor for sparkdl's NCCL; it keeps the tensor alive."""
    return DeviceArray(
        pointer=tensor.data_ptr(),
        count=tensor.numel(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        gpu=tensor.device.index,
        owner=tensor,
    )
