"""Groups of ranks with a GPU each that communicate by NCCL.

Arrays are in GPU memory and describe themselves, streams are integers. A batch holds the operations that NCCL runs at
once.

The communicator that a group was opened over supplies what NCCL does not report: which rank died, and which aborted
and why. The two fail together. NCCL detects late or never that a peer has died, and cannot name it; the communicator
does both. Aborting NCCL ends only the own rank's part; the communicator notifies the other ranks.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from sparkdl._native import NcclOperation
from sparkdl.collective.buffers import DeviceArray, device_array, item_bytes
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, ParamError
from sparkdl.rendezvous.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from sparkdl._native import NcclCommunicator
    from sparkdl.collective.communicator import Array, Communicator

logger = logging.getLogger(__name__)


_BITS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


class NcclBatch:
    """Operations of an :class:`~sparkdl.collective.nccl.group.NcclGroup` that run at once, as NCCL's group calls.

    Each method adds one and returns the batch; :meth:`run` puts them on a stream::

        group.batch().send(mine, to=1).recv(theirs, source=1).run(stream=stream)

    Arrays are C-contiguous and in memory of the group's GPU (see :mod:`sparkdl.collective.buffers`). All element
    types can be moved. NCCL reduces float16, bfloat16, float32, float64, int8, int32, int64 and their unsigned forms;
    the sum and the product of bools are their "or" and "and". It accumulates as NCCL does, which may be in the
    element type.
    """

    def __init__(self, group: NcclGroup) -> None:
        self._group = group
        self._operations: list[NcclOperation] = []
        self._arrays: list[DeviceArray] = []

    def allreduce(self, array: Array, *, op: str = "sum", prescale: float = 1.0) -> NcclBatch:
        """Reduce ``array`` over all ranks, in place. ``prescale`` multiplies what goes into a sum or an average."""
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
        """Reduce ``array`` over all ranks into rank ``root``'s; the other ranks keep theirs."""
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
        """Copy rank ``root``'s ``array`` into that of every other rank."""
        taken = self._take(array, writes=self._group.rank != root)
        num_bytes = taken.count * item_bytes(taken.dtype)
        return self._add(NcclOperation.broadcast(taken.pointer, taken.pointer, num_bytes, "uint8", root))

    def send(self, array: Array, *, to: int) -> NcclBatch:
        """Send ``array`` to a rank, which must ``recv`` as many bytes; in order of sending."""
        taken = self._take(array)
        return self._add(
            NcclOperation.send(taken.pointer, taken.count * item_bytes(taken.dtype), "uint8", to)
        )

    def recv(self, array: Array, *, source: int) -> NcclBatch:
        """Receive into ``array`` what a rank sends."""
        taken = self._take(array, writes=True)
        num_bytes = taken.count * item_bytes(taken.dtype)
        return self._add(NcclOperation.recv(taken.pointer, num_bytes, "uint8", source))

    def alltoall(
        self, array: Array, out: Array, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NcclBatch:
        """Send block r of ``array`` to rank r; ``out`` takes the blocks that the ranks send, in order of rank.

        Args:
            array: the blocks for all ranks one after another.
            out: the blocks of all ranks one after another; another memory.
            send_counts: elements of each block of ``array``.
            receive_counts: elements of each block of ``out``.
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

    def run(self, *, stream: int, timeout_s: float | None = None) -> NcclHandle:
        """Put the operations on a stream and return, before they are done.

        Args:
            stream: the ``cudaStream_t`` as an integer; 0 is the default stream.
            timeout_s: by when they must be complete on the GPU, or the group fails; its own deadline when None.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        return self._group.run(self._operations, self._arrays, stream=stream, timeout_s=timeout_s)

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
        """The dtype and operation that NCCL is given, and the factor of a sum."""
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
"""How long to wait for the communicator's notice of the rank that died."""


class NcclWatch:
    """Aborts either when the other has failed, by a thread that sleeps while nothing is under way.

    Args:
        core: the NCCL communicator.
        communicator: the communicator below.
        name: what the group is called in messages.
    """

    def __init__(self, core: NcclCommunicator, communicator: Communicator, name: str) -> None:
        self._core = core
        self._communicator = communicator
        self._name = name
        self._started = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"sparkdl-{name}-watch", daemon=True)
        self._thread.start()

    def note_start(self) -> None:
        """Note that an operation was put on a stream."""
        self._started.set()

    def check(self) -> None:
        """Raise the communicator's error if it has failed."""
        if self._communicator.failure is not None:
            raise self._communicators_error()

    def explain(self, error: CommunicatorError) -> CommunicatorError:
        """The error to raise when NCCL gave this one: the communicator's where it knows more.

        Waits a moment for the communicator's own error, then aborts it, so that the other ranks fail, too.
        """
        deadline = Deadline(_NEWS_S)
        while self._communicator.failure is None and not deadline.expired:
            self._closed.wait(0.02)
        if self._communicator.failure is None:
            self._communicator.abort(f"{self._name}: {error}")
            return error
        return self._communicators_error()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._started.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._started.wait()
            self._started.clear()
            while self._core.busy and not self._closed.wait(_LOOK_S):
                self._look()
            if not self._closed.is_set():
                self._look()

    def _look(self) -> None:
        failure = self._communicator.failure
        if failure is not None:
            self._core.abort(failure)
        elif self._core.failure is not None:
            self.explain(CommunicatorError(self._core.failure))

    def _communicators_error(self) -> CommunicatorError:
        """What the communicator failed with, which every further operation raises."""
        try:
            self._communicator.barrier()
        except CommunicatorError as error:
            self._core.abort(str(error))
            return error
        raise AssertionError(f"a failed communicator took part in a barrier: {self._communicator.failure}")


class NcclHandle:
    """Operations that were put on a stream. It keeps their arrays as long as it lives itself."""

    def __init__(self, group: NcclGroup, number: int, arrays: Sequence[DeviceArray]) -> None:
        self._group = group
        self._number = number
        self._arrays = arrays

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the GPU has done them; what comes after them on their stream waits by itself.

        Args:
            timeout_s: seconds to wait at most; the operations' own deadline when None.

        Raises:
            CommunicatorTimeoutError: if they are not done by then; they continue and can be waited for again.
            CommunicatorError: what the group has failed with.
        """
        self._group.wait(self._number, timeout_s)

    def done(self) -> bool:
        """Whether the GPU has done them.

        Raises:
            CommunicatorError: what the group has failed with.
        """
        return self._group.is_done(self._number)


class NcclGroup:
    """An open NCCL communicator; made by :func:`~sparkdl.collective.nccl.opening.open_nccl_group`.

    It shares the fate of the communicator below: when one of them fails, the other is aborted, on all ranks. A
    context manager: closes on success, aborts on exception. NCCL wants the same operations in the same order on all
    ranks and checks none of it.

    Attributes:
        communicator: the communicator below, of the same ranks.
        gpu: number of this rank's GPU in this process.
        name: what the group is called in messages.
        timeout_s: by when operations must be complete, in seconds, unless they say otherwise.
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
        self.gpu = gpu
        self.name = name
        self.timeout_s = timeout_s
        self._owns_communicator = owns_communicator
        self._watch = NcclWatch(core, communicator, name)
        self._closed = False

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.communicator.world_size

    @property
    def failure(self) -> str | None:
        """Why the group cannot be used any more; None as long as it can."""
        return self.communicator.failure or self._core.failure

    def check(self) -> None:
        """Return at once, unless the group has failed.

        Raises:
            CommunicatorError: what it has failed with; the subclass says how.
        """
        self.is_done(0)

    def error(self) -> CommunicatorError | None:
        """What :meth:`check` raises, or None."""
        try:
            self.check()
        except CommunicatorError as error:
            return error
        return None

    def batch(self) -> NcclBatch:
        """An empty batch of operations."""
        return NcclBatch(self)

    def run(
        self,
        operations: Sequence[NcclOperation],
        arrays: Sequence[DeviceArray],
        *,
        stream: int,
        timeout_s: float | None = None,
    ) -> NcclHandle:
        """What :meth:`NcclBatch.run` does; nothing happens if there are no operations."""
        with self._errors():
            number = 0
            if operations:
                number = self._core.run(operations, stream, timeout_s or self.timeout_s)
                self._watch.note_start()
        return NcclHandle(self, number, arrays)

    def is_done(self, number: int) -> bool:
        """Whether the GPU has done what has this number, and everything before it."""
        with self._errors():
            return self._core.done(number)

    def wait(self, number: int, timeout_s: float | None) -> None:
        """Block the host until :meth:`is_done`."""
        with self._errors():
            self._core.wait(number, self.timeout_s if timeout_s is None else timeout_s)

    def split(self, ranks: Sequence[int], name: str) -> NcclGroup | None:
        """Open a process set by ``ncclCommSplit``. All ranks of the group make this call, with the same arguments.

        Args:
            ranks: the members; their order gives their ranks in the process set.
            name: distinguishes process sets.

        Returns:
            The process set, to be closed by the caller; None on a rank that is not in it.

        Raises:
            ParamError: if ``ranks`` cannot be a process set.
            CommunicatorError: if it cannot be opened; the group is of no further use then.
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
        with self._errors():
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
        """Make every operation fail with ``reason``, here and on all peers; returns at once."""
        self._core.abort(f"rank {self.rank} aborted: {reason}")
        self.communicator.abort(reason)

    def close(self) -> None:
        """Wait for what is under way and leave. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._core.close()
        except CommunicatorError:
            # The operation that a lost rank broke has raised already; NCCL may notice the loss only now.
            if self.communicator.failure is None:
                raise
        finally:
            self._watch.close()
            if self._owns_communicator:
                self.communicator.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise the communicator's error in place of NCCL's."""
        self._watch.check()
        try:
            yield
        except CommunicatorError as error:
            if self._core.failure is None or self._closed:
                raise
            raise self._watch.explain(error) from error

    def __enter__(self) -> NcclGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.failure is None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()
