"""Groups of ranks with one GPU each that communicate by NCCL.

Arrays are in GPU memory, of any library with ``__dlpack__`` or ``__cuda_array_interface__``; streams are integers. A
batch holds the operations that NCCL runs together.

The communicator over which a group was opened supplies what NCCL does not report: which rank died, and which one
aborted and why. The two fail together. NCCL detects late or never that another rank has died, and cannot name it; the
communicator does both. Aborting NCCL affects only the rank that aborts; the communicator notifies the other ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from sparkdl._native import NcclOperation
from sparkdl.collective.buffers import DeviceArray, device_array, item_bytes
from sparkdl.collective.watch import Watch
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, ParamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from sparkdl._native import NcclCommunicator
    from sparkdl.collective.communicator import Array, Communicator


Result = TypeVar("Result")

_BITS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


class NcclBatch:
    """Operations of an :class:`~sparkdl.collective.nccl.group.NcclGroup` that run together, as NCCL's group calls.

    Each method adds an operation and returns the batch; :meth:`run` puts them on a stream::

        group.batch().send(mine, to=1).recv(theirs, source=1).run(stream=stream)

    Arrays are C-contiguous and in memory of the group's GPU (see :mod:`sparkdl.collective.buffers`). All element
    types can be moved. NCCL reduces float16, bfloat16, float32, float64, int8, int32, int64 and their unsigned forms;
    the sum of bools is their logical "or", the product their logical "and". NCCL decides the type in which it
    accumulates, which may be the element type.
    """

    def __init__(self, group: NcclGroup) -> None:
        self._group = group
        self._operations: list[NcclOperation] = []
        self._arrays: list[DeviceArray] = []

    def allreduce(self, array: Array, *, op: str = "sum", prescale: float = 1.0) -> NcclBatch:
        """Reduce ``array`` over all ranks, in place. ``prescale`` multiplies the inputs of a sum or an average."""
        taken = self._take(array, writes=True)
        dtype, op, factor = self._reduction(taken, op, prescale)
        return self._add(
            NcclOperation.allreduce(taken.pointer, taken.pointer, taken.count, dtype, op, factor)
        )

    def reduce_scatter(
        self, array: Array, out: Array, *, op: str = "sum", prescale: float = 1.0
    ) -> NcclBatch:
        """Reduce ``array``, one block like ``out`` per rank, over all ranks; rank r gets block r in ``out``."""
        taken, block = self._take(array), self._take(out, writes=True)
        self._check_blocks(taken, block, "array", "out")
        dtype, op, factor = self._reduction(taken, op, prescale)
        return self._add(
            NcclOperation.reduce_scatter(taken.pointer, block.pointer, block.count, dtype, op, factor)
        )

    def reduce(self, array: Array, *, root: int, op: str = "sum", prescale: float = 1.0) -> NcclBatch:
        """Reduce ``array`` over all ranks into the ``array`` of rank ``root``; other ranks keep their elements."""
        taken = self._take(array, writes=self._group.rank == root)
        dtype, op, factor = self._reduction(taken, op, prescale)
        return self._add(
            NcclOperation.reduce(taken.pointer, taken.pointer, taken.count, dtype, root, op, factor)
        )

    def allgather(self, array: Array, out: Array) -> NcclBatch:
        """Put the ``array`` of every rank, all of one size, into ``out``, in order of rank."""
        block, taken = self._take(array), self._take(out, writes=True)
        self._check_blocks(taken, block, "out", "array")
        num_bytes = block.count * item_bytes(block.dtype)
        return self._add(NcclOperation.allgather(block.pointer, taken.pointer, num_bytes, "uint8"))

    def broadcast(self, array: Array, *, root: int) -> NcclBatch:
        """Copy the ``array`` of rank ``root`` into the ``array`` of every other rank."""
        taken = self._take(array, writes=self._group.rank != root)
        num_bytes = taken.count * item_bytes(taken.dtype)
        return self._add(NcclOperation.broadcast(taken.pointer, taken.pointer, num_bytes, "uint8", root))

    def send(self, array: Array, *, to: int) -> NcclBatch:
        """Send ``array`` to rank ``to``, which must ``recv`` the same number of bytes; in the order of sending."""
        taken = self._take(array)
        return self._add(
            NcclOperation.send(taken.pointer, taken.count * item_bytes(taken.dtype), "uint8", to)
        )

    def recv(self, array: Array, *, source: int) -> NcclBatch:
        """Receive a message from rank ``source`` into ``array``."""
        taken = self._take(array, writes=True)
        num_bytes = taken.count * item_bytes(taken.dtype)
        return self._add(NcclOperation.recv(taken.pointer, num_bytes, "uint8", source))

    def alltoall(
        self, array: Array, out: Array, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NcclBatch:
        """Send block r of ``array`` to rank r; ``out`` takes the blocks that the ranks send, in order of rank.

        Args:
            array: blocks for all ranks, one after another.
            out: memory for the blocks from all ranks, one after another; must not overlap ``array``.
            send_counts: number of elements of each block of ``array``.
            receive_counts: number of elements of each block of ``out``.
        """
        sent, received = self._take(array), self._take(out, writes=True)
        size = item_bytes(sent.dtype)
        ends = 0, 0
        for rank, (send, receive) in enumerate(zip(send_counts, receive_counts, strict=True)):
            if send:
                start = sent.elements(ends[0], send, size)
                self._add(NcclOperation.send(start, send * size, "uint8", rank))
            if receive:
                start = received.elements(ends[1], receive, size)
                self._add(NcclOperation.recv(start, receive * size, "uint8", rank))
            ends = ends[0] + send, ends[1] + receive
        return self

    def run(self, *, stream: int, after: int | None = None, timeout_s: float | None = None) -> NcclHandle:
        """Put the operations on a stream and return before they are complete.

        Args:
            stream: the ``cudaStream_t`` as an integer; 0 is the default stream.
            after: another stream, whose work so far the operations follow, too.
            timeout_s: seconds after which the group fails if they are not complete; the group's deadline when None.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        return self._group.run(
            self._operations, self._arrays, stream=stream, after=after, timeout_s=timeout_s
        )

    def _take(self, array: Array, *, writes: bool = False) -> DeviceArray:
        taken = device_array(array)
        if writes and not taken.is_writable:
            raise ParamError("the array is read-only, but NCCL would write to it")
        if taken.gpu is not None and taken.gpu != self._group.gpu:
            raise ParamError(
                f"the array is on GPU {taken.gpu}, but {self._group.name!r} was opened on GPU {self._group.gpu}"
            )
        self._arrays.append(taken)
        return taken

    def _add(self, operation: NcclOperation) -> NcclBatch:
        self._operations.append(operation)
        return self

    def _check_blocks(self, whole: DeviceArray, block: DeviceArray, whole_name: str, block_name: str) -> None:
        expected = block.count * self._group.world_size
        if whole.count != expected or whole.dtype != block.dtype:
            raise ParamError(
                f"{whole_name} must hold a block like {block_name} for each of {self._group.world_size} ranks:"
                f" {expected} {block.dtype}, got {whole.count} {whole.dtype}"
            )

    def _reduction(self, array: DeviceArray, op: str, prescale: float) -> tuple[str, str, bytes]:
        """Return the dtype and the operation for NCCL, and the factor of a sum; empty for no factor."""
        if array.dtype == "bool":
            if op not in _BITS or prescale != 1.0:
                raise ParamError(f"bools can be reduced by {sorted(_BITS)} and are not scaled, got {op!r}")
            return "uint8", _BITS[op], b""
        if prescale == 1.0:
            return array.dtype, op, b""
        if op not in ("sum", "avg") or not array.dtype.startswith(("float", "bfloat")):
            raise ParamError(
                f"NCCL scales the sum and the average of floats alone; scale the {array.dtype} yourself before"
                f" reducing by {op!r}"
            )
        factor = prescale / self._group.world_size if op == "avg" else prescale
        return array.dtype, "sum", _as_element(factor, array.dtype)


def _as_element(value: float, dtype: str) -> bytes:
    if dtype != "bfloat16":
        return np.array(value, dtype).tobytes()
    # The upper half of a float32, rounded to nearest even.
    bits = int(np.array(value, np.float32).view(np.uint32))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to_bytes(2, "little")


_LOOK_S = 0.1
"""Pause between two checks of operations under way: NCCL has no deadlines and does not report errors by itself."""

_NEWS_S = 1.0
"""How long to wait until the communicator reports the rank that died."""


class SharedFate:
    """Aborts NCCL when the communicator has failed, and vice versa, by a thread that looks while operations run.

    Args:
        core: NCCL communicator.
        communicator: communicator over which NCCL was opened.
        name: name of the group in messages.

    Attributes:
        watch: the thread, to be woken once an operation was put on a stream.
    """

    def __init__(self, core: NcclCommunicator, communicator: Communicator, name: str) -> None:
        self._core = core
        self._communicator = communicator
        self._name = name
        self.watch = Watch(self._look, name=f"sparkdl-{name}-watch", pause_s=_LOOK_S)

    def explain(self, error: CommunicatorError) -> CommunicatorError:
        """Return the error to raise for an error of NCCL: the communicator's error if it has one.

        Waits a moment for the communicator's own error; if there is none, aborts the communicator, so that the other
        ranks fail too.
        """
        if not self._communicator.has_failed_within(_NEWS_S):
            self._communicator.abort(f"{self._name}: {error}")
            return error
        return self.communicators_error()

    def _look(self) -> bool:
        failure = self._communicator.failure
        if failure is not None:
            self._core.abort(failure)
        elif self._core.failure is not None:
            self.explain(CommunicatorError(self._core.failure))
        return self._core.busy

    def communicators_error(self) -> CommunicatorError:
        """Abort NCCL because the communicator has failed, and return the communicator's error."""
        error = self._communicator.error()
        self._core.abort(str(error))
        return error


class NcclHandle:
    """Handle of operations that were put on a stream; keeps their arrays alive as long as it exists."""

    def __init__(self, group: NcclGroup, number: int, arrays: Sequence[DeviceArray]) -> None:
        self._group = group
        self._number = number
        self._arrays = arrays

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the calling thread until the GPU has completed the operations.

        Later work on their stream runs after them without this call.

        Args:
            timeout_s: seconds to wait at most; the group's deadline when None.

        Raises:
            CommunicatorTimeoutError: if they are not complete in time; they continue and can be waited for again.
            CommunicatorError: if the group has failed; the subclass says how.
        """
        with self._group.errors() as core:
            core.wait(self._number, self._group.timeout_s if timeout_s is None else timeout_s)

    def owners(self) -> list[Any]:
        """The arrays that the operations use."""
        return [array.owner for array in self._arrays]

    def join(self, stream: int) -> None:
        """Make later work on another stream follow the operations; the host does not wait.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        self._group.join(self._number, stream)

    def done(self) -> bool:
        """Whether the GPU has completed the operations.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        return self._group.is_done(self._number)


class NcclGroup(AbstractContextManager["NcclGroup"]):
    """An open NCCL communicator; created by :func:`~sparkdl.collective.nccl.opening.open_nccl_group`.

    It fails together with the communicator over which it was opened: when one of them fails, the other is aborted, on
    all ranks. A context manager: closes on success, aborts on exception. NCCL requires the same operations in the same
    order on all ranks, and does not check this.

    Attributes:
        communicator: communicator over which the group was opened, of the same ranks.
        rank: number of this rank.
        world_size: number of ranks.
        gpu: number of this rank's GPU in this process.
        name: name of the group in messages.
        timeout_s: default deadline of operations, in seconds.
    """

    def __init__(
        self,
        core: NcclCommunicator,
        communicator: Communicator,
        *,
        gpu: int,
        name: str,
        timeout_s: float,
        owns_communicator: bool = False,
    ) -> None:
        self._core = core
        self.communicator = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.gpu = gpu
        self.name = name
        self.timeout_s = timeout_s
        self._owns_communicator = owns_communicator
        self._fate = SharedFate(core, communicator, name)
        self._closed = False

    @property
    def failure(self) -> str | None:
        """Why the group cannot be used any more; None while it can be used."""
        return self.communicator.failure or self._core.failure

    def check(self) -> None:
        """Return at once, unless the group has failed.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        self.is_done(0)

    def error(self) -> CommunicatorError | None:
        """Return the error that :meth:`check` raises, or None."""
        try:
            self.check()
        except CommunicatorError as error:
            return error
        return None

    def batch(self) -> NcclBatch:
        """Return an empty batch of operations."""
        return NcclBatch(self)

    def run(
        self,
        operations: Sequence[NcclOperation],
        arrays: Sequence[DeviceArray],
        *,
        stream: int,
        after: int | None = None,
        timeout_s: float | None = None,
    ) -> NcclHandle:
        """Put operations on a stream, as :meth:`NcclBatch.run` does; does nothing if there are none."""
        number = 0
        if operations:
            timeout_s = self.timeout_s if timeout_s is None else timeout_s
            number = self._call(lambda core: core.run(operations, stream, timeout_s, after))
            self._fate.watch.wake()
        else:
            self.check()
        return NcclHandle(self, number, arrays)

    def is_done(self, number: int) -> bool:
        """Whether the GPU has completed the operations with this number, and all earlier ones."""
        return self._call(lambda core: core.done(number))

    def join(self, number: int, stream: int) -> None:
        """Make later work on a stream follow the operations with this number; the host does not wait."""
        self._call(lambda core: core.join(number, stream))

    def split(self, ranks: Sequence[int], name: str) -> NcclGroup | None:
        """Open a process set by ``ncclCommSplit``. All ranks of the group must make this call with the same arguments.

        Args:
            ranks: the members; their order gives their ranks in the process set.
            name: distinguishes process sets.

        Returns:
            The process set, to be closed by the caller; None on a rank that is not in it.

        Raises:
            ParamError: if ``ranks`` cannot be a process set.
            CommunicatorError: if it cannot be opened; the group can then not be used any more.
        """
        communicator = self.communicator.split(ranks, name)
        full_name = f"{self.name}/{name}"
        try:
            core = self._split_core(list(ranks), full_name)
        except BaseException:
            communicator.close()
            raise
        if core is None:
            return None
        return NcclGroup(
            core,
            communicator,
            gpu=self.gpu,
            name=full_name,
            timeout_s=self.timeout_s,
            owns_communicator=True,
        )

    def _split_core(self, members: list[int], name: str) -> NcclCommunicator | None:
        is_member = self.rank in members
        rank = members.index(self.rank) if is_member else 0
        with self.errors():
            core = self._core.split(
                0 if is_member else None,
                rank,
                rank=rank,
                world_size=len(members),
                name=name,
                timeout_s=self.timeout_s,
            )
            if not (core or self._core).wait_ready(self.timeout_s):
                late = f"{name!r} was not split off within {self.timeout_s:g} s"
                self._core.abort(late)
                raise CommunicatorTimeoutError(f"{late}: all ranks of {self.name!r} must take part")
            return core

    def abort(self, reason: str) -> None:
        """Make every operation fail with ``reason``, on this rank and on all others; returns at once."""
        self._core.abort(f"rank {self.rank} aborted: {reason}")
        self.communicator.abort(reason)

    def close(self) -> None:
        """Wait for operations under way, and leave the group. May be called again.

        NCCL also waits for CUDA graphs that captured operations of the group: reset them before.

        Raises:
            CommunicatorTimeoutError: if NCCL does not close within the group's deadline.
            CommunicatorError: if the group has failed; the subclass says how.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._core.close()
        except CommunicatorError:
            # The operation in which a rank was lost has already raised an error; NCCL may notice the loss only now.
            if self.communicator.failure is None:
                raise
        finally:
            self._fate.watch.close()
            if self._owns_communicator:
                self.communicator.close()

    @contextmanager
    def errors(self) -> Iterator[NcclCommunicator]:
        """In this context, in which NCCL is called, raise the communicator's error in place of NCCL's."""
        if self.communicator.failure is not None:
            raise self._fate.communicators_error()
        try:
            yield self._core
        except CommunicatorError as error:
            self._explain(error)

    def _call(self, function: Callable[[NcclCommunicator], Result]) -> Result:
        """The same as :meth:`errors`, which takes some microseconds, for one call."""
        if self.communicator.failure is not None:
            raise self._fate.communicators_error()
        try:
            return function(self._core)
        except CommunicatorError as error:
            self._explain(error)

    def _explain(self, error: CommunicatorError) -> NoReturn:
        if self._core.failure is None or self._closed:
            raise error
        raise self._fate.explain(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.failure is None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()
