"""Groups of ranks with one GPU each that communicate by NCCL.

Arrays in GPU memory are described by :class:`~sparkdl.collective.buffers.DeviceArray`; streams are integers. A batch
holds the operations that NCCL runs together.

The communicator over which a group was opened supplies what NCCL does not report: which rank died, and which one
aborted and why. The two fail together. NCCL detects late or never that another rank has died, and cannot name it; the
communicator does both. Aborting NCCL affects only the rank that aborts; the communicator notifies the other ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from sparkdl._native import NcclOperation
from sparkdl.collective.buffers import item_bytes
from sparkdl.collective.watch import Watch
from sparkdl.errors import CommunicatorError, ParamError
from sparkdl.foreign_errors import as_utf8

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from sparkdl._native import NcclCommunicator
    from sparkdl.collective.buffers import DeviceArray
    from sparkdl.collective.communicator import Communicator


Result = TypeVar("Result")

_BITS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


class NcclBatch:
    """Operations of an :class:`~sparkdl.collective.nccl.group.NcclGroup` that run together, as NCCL's group calls.

    Each method adds an operation and returns the batch; :meth:`run` puts them on a stream::

        group.batch().send(mine, to=1).recv(theirs, source=1).run(stream=stream)

    Arrays are in memory of the group's GPU. All element types can be moved. NCCL reduces float16, bfloat16, float32,
    float64, int8, int32, int64 and their unsigned forms; the sum of bools is their logical "or", the product their
    logical "and". NCCL decides the type in which it accumulates, which may be the element type.
    """

    def __init__(self, group: NcclGroup) -> None:
        self._group = group
        self._operations: list[NcclOperation] = []
        self._arrays: list[DeviceArray] = []

    def allreduce(self, array: DeviceArray, *, op: str = "sum", prescale: float = 1.0) -> NcclBatch:
        """Reduce ``array`` over all ranks, in place. ``prescale`` multiplies the inputs of a sum or an average."""
        dtype, op, factor = self._reduction(array, op, prescale)
        operation = NcclOperation.allreduce(array.pointer, array.pointer, array.count, dtype, op, factor)
        return self._add(operation, array)

    def reduce_scatter(
        self, array: DeviceArray, out: DeviceArray, *, op: str = "sum", prescale: float = 1.0
    ) -> NcclBatch:
        """Reduce ``array``, one block like ``out`` per rank, over all ranks; rank r gets block r in ``out``."""
        self._check_blocks(array, out, "array", "out")
        dtype, op, factor = self._reduction(array, op, prescale)
        operation = NcclOperation.reduce_scatter(array.pointer, out.pointer, out.count, dtype, op, factor)
        return self._add(operation, array, out)

    def reduce(self, array: DeviceArray, *, root: int, op: str = "sum", prescale: float = 1.0) -> NcclBatch:
        """Reduce ``array`` over all ranks into the ``array`` of rank ``root``; other ranks keep their elements."""
        dtype, op, factor = self._reduction(array, op, prescale)
        operation = NcclOperation.reduce(array.pointer, array.pointer, array.count, dtype, root, op, factor)
        return self._add(operation, array)

    def allgather(self, array: DeviceArray, out: DeviceArray) -> NcclBatch:
        """Put the ``array`` of every rank, all of one size, into ``out``, in order of rank."""
        self._check_blocks(out, array, "out", "array")
        num_bytes = array.count * item_bytes(array.dtype)
        return self._add(NcclOperation.allgather(array.pointer, out.pointer, num_bytes, "uint8"), array, out)

    def broadcast(self, array: DeviceArray, *, root: int) -> NcclBatch:
        """Copy the ``array`` of rank ``root`` into the ``array`` of every other rank."""
        num_bytes = array.count * item_bytes(array.dtype)
        operation = NcclOperation.broadcast(array.pointer, array.pointer, num_bytes, "uint8", root)
        return self._add(operation, array)

    def send(self, array: DeviceArray, *, to: int) -> NcclBatch:
        """Send ``array`` to rank ``to``, which must ``recv`` the same number of bytes; in the order of sending."""
        num_bytes = array.count * item_bytes(array.dtype)
        return self._add(NcclOperation.send(array.pointer, num_bytes, "uint8", to), array)

    def recv(self, array: DeviceArray, *, source: int) -> NcclBatch:
        """Receive a message from rank ``source`` into ``array``."""
        num_bytes = array.count * item_bytes(array.dtype)
        return self._add(NcclOperation.recv(array.pointer, num_bytes, "uint8", source), array)

    def run(self, *, stream: int, after: int | None = None, timeout_s: float | None = None) -> NcclHandle:
        """Put the operations on a stream and return before they are complete.

        Args:
            stream: the ``cudaStream_t`` as an integer; 0 is the default stream.
            after: another stream, whose work so far the operations follow, too.
            timeout_s: seconds after which the group fails if they are not complete; the group's deadline when None.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        group, number = self._group, 0
        if self._operations:
            limit_s = group.timeout_s if timeout_s is None else timeout_s
            number = group.call(lambda core: core.run(self._operations, stream, limit_s, after))
            group.watch.wake()
        else:
            group.check()
        return NcclHandle(group, number, self._arrays)

    def _add(self, operation: NcclOperation, *arrays: DeviceArray) -> NcclBatch:
        for array in arrays:
            if array.gpu is not None and array.gpu != self._group.gpu:
                raise ParamError(
                    f"the array is on GPU {array.gpu}, but {self._group.name!r} was opened on GPU {self._group.gpu}"
                )
        self._arrays += arrays
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
                raise ParamError(
                    f"bools can be reduced by {sorted(_BITS)}, without a factor; got op={op!r}, prescale={prescale:g}"
                )
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


class NcclHandle:
    """Handle of operations that were put on a stream; keeps their arrays alive as long as it exists.

    Attributes:
        arrays: the arrays that the operations use.
    """

    def __init__(self, group: NcclGroup, number: int, arrays: list[DeviceArray]) -> None:
        self._group = group
        self._number = number
        self.arrays = arrays

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the calling thread until the GPU has completed the operations.

        Later work on their stream runs after them without this call.

        Args:
            timeout_s: seconds to wait at most; the group's deadline when None.

        Raises:
            CommunicatorTimeoutError: if they are not complete in time; they continue and can be waited for again.
            CommunicatorError: if the group has failed; the subclass says how.
        """
        limit_s = self._group.timeout_s if timeout_s is None else timeout_s
        self._group.call(lambda core: core.wait(self._number, limit_s))

    def join(self, stream: int) -> None:
        """Make later work on another stream follow the operations; the host does not wait.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        self._group.call(lambda core: core.join(self._number, stream))

    def done(self) -> bool:
        """Whether the GPU has completed the operations.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        return self._group.call(lambda core: core.done(self._number))


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
        watch: thread that aborts NCCL when the communicator has failed, and vice versa; to be woken once an operation
            was put on a stream.
    """

    def __init__(
        self, core: NcclCommunicator, communicator: Communicator, *, gpu: int, name: str, timeout_s: float
    ) -> None:
        self._core = core
        self.communicator = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.gpu = gpu
        self.name = name
        self.timeout_s = timeout_s
        self._closed = False
        self.watch = Watch(self._look, name=f"sparkdl-{name}-watch", pause_s=_LOOK_S)

    @property
    def failure(self) -> str | None:
        """Why the group cannot be used any more; None while it can be used."""
        return self.communicator.failure or self._core.failure

    def check(self) -> None:
        """Return at once, unless the group has failed.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        self.call(lambda core: core.done(0))

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

    def abort(self, reason: str) -> None:
        """Make every operation fail with ``reason``, on this rank and on all others; returns at once."""
        reason = as_utf8(reason)
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
            self.watch.close()

    def call(self, function: Callable[[NcclCommunicator], Result]) -> Result:
        """Call NCCL by a function, and return its result.

        Raises:
            CommunicatorError: if the group has failed: the communicator's error in place of NCCL's, if it has one.
        """
        if self.communicator.failure is not None:
            raise self._communicators_error()
        try:
            return function(self._core)
        except CommunicatorError as error:
            if self._core.failure is None or self._closed:
                raise
            raise self._explain(error) from error

    def _explain(self, error: CommunicatorError) -> CommunicatorError:
        """Return the error to raise for an error of NCCL: the communicator's error if it has one.

        Waits a moment for the communicator's own error; if there is none, aborts the communicator, so that the other
        ranks fail too.
        """
        if not self.communicator.has_failed_within(_NEWS_S):
            self.communicator.abort(f"{self.name}: {error}")
            return error
        return self._communicators_error()

    def _communicators_error(self) -> CommunicatorError:
        """Abort NCCL because the communicator has failed, and return the communicator's error."""
        error = self.communicator.error()
        self._core.abort(str(error))
        return error

    def _look(self) -> bool:
        failure = self.communicator.failure
        if failure is not None:
            self._core.abort(failure)
        elif self._core.failure is not None:
            self._explain(CommunicatorError(self._core.failure))
        return self._core.busy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.failure is None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()
