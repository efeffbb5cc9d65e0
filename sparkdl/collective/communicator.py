"""The contract of every communicator, and of the handles that its asynchronous operations return.

Runs on ranks. Arrays are buffers in CPU memory: NumPy arrays, or anything with ``__dlpack__`` such as torch tensors.
Their elements are float32, float64, float16, bfloat16, int8 to int64, uint8 to uint64, or bool, taken in row-major
order. An array that is not C-contiguous is copied when its operation begins, as far as it is read, and copied back
after the operation has succeeded, as far as it is written.

Reductions: ``op`` is ``"sum"``, ``"avg"``, ``"min"``, ``"max"`` or ``"product"``. float16 and bfloat16 are
accumulated in float32 and rounded once; the sum and the product of bools are their "or" and "and". ``prescale``
multiplies the inputs, ``postscale`` the results; integers are multiplied as float64 and rounded toward zero.

Sums and products of integers wrap around. Averages of integers are rounded toward zero. Integers of 8 to 32 bits are
averaged in a wider type. int64 and uint64 have no wider type: where the sum does not fit, the average is that of the
wrapped sum. Convert such numbers to float64 first.

A NaN on any rank is both the minimum and the maximum, and makes every sum, average and product NaN. Of 0.0 and -0.0
the native transport takes the one that comes later in its order of the ranks; over MPI, -0.0 is below 0.0. All ranks
get the same bits, with one exception: over MPI, the sign and the payload of a NaN that is a sum, an average or a
product may differ.

``name`` identifies the operation in messages and reports. The ranks must agree on it, and on operation, dtype, sizes,
reduction, scales and root: otherwise all of them raise the same :class:`MismatchError`, nothing is written, and the
communicator can still be used.

Every operation has a deadline, ``timeout_s`` or the communicator's own. After any failure other than a mismatch the
communicator cannot be used any more. All ranks must call the same operations in the same order, except that messages
(``send`` and ``recv``) are ordered only within a pair of ranks and a tag.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol

import numpy as np

from sparkdl.collective.process_sets import Splittable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType


P = ParamSpec("P")

Array = Any
"""A CPU buffer; see the head of this module."""


def _blocking(start: Callable[Concatenate[Any, P], Handle]) -> Callable[Concatenate[Any, P], None]:
    """The form of an operation that starts it and waits until its result is there.

    Raises:
        MismatchError: on every rank, if the ranks disagree; the message says which rank said what.
        CommunicatorTimeoutError: if some rank does not join in time; the message names it.
        RankLostError: if a rank has died; the message names it.
        CommunicatorAbortedError: if a rank aborted; the message has its reason.
    """

    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        getattr(self, start.__name__)(*args, **kwargs).wait()

    update_wrapper(run, start)
    vars(run).pop("__isabstractmethod__", None)  # the blocking form is not abstract
    return run


class Communicator(Splittable, ABC):
    """The open group of ranks. A context manager: closes on success, aborts on exception.

    An operation is there twice: ``x`` blocks until its result is there, ``x_async`` returns a handle at once and
    takes the same arguments. Operations of one rank run in the order of its calls.
    """

    @property
    @abstractmethod
    def transport(self) -> str:
        """What carries the data: ``"native"`` or ``"mpi"``."""

    @property
    def takes_device_memory(self) -> bool:
        """Whether :meth:`send` and :meth:`recv` also take a :class:`~sparkdl.collective.buffers.DeviceArray`.

        What is on a stream is not waited for: the caller does, and so for what a received array is used for.
        """
        return False

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why the communicator cannot be used any more; None as long as it can."""

    @abstractmethod
    def allreduce_async(
        self,
        array: Array,
        *,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """Reduce ``array`` over all ranks, in place; every rank ends with the same bits."""

    @abstractmethod
    def allreduce_group_async(
        self,
        arrays: Sequence[Array],
        *,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """:meth:`allreduce` of several arrays of one dtype as one operation, which costs about what one array would."""

    @abstractmethod
    def reduce_scatter_async(
        self,
        array: Array,
        out: Array,
        *,
        counts: Sequence[int] | None = None,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """Reduce ``array`` over all ranks; rank r gets block r in ``out``.

        Args:
            array: the blocks of all ranks one after another; may contain ``out`` as this rank's block.
            out: the block of this rank; same dtype.
            counts: elements of each rank's block, the same on every rank; equal blocks when None.
            op: how to reduce.
            prescale: factor of what goes in.
            postscale: factor of what comes out.
            name: what it is.
            timeout_s: deadline.
        """

    @abstractmethod
    def reduce_scatter_group_async(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        *,
        counts: Sequence[Sequence[int] | None] | None = None,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """:meth:`reduce_scatter` of several arrays of one dtype as one operation, which costs about what one would.

        Args:
            arrays: each the blocks of all ranks one after another; may contain its own ``out`` as this rank's block,
                but no other one.
            outs: for each of them, the block of this rank.
            counts: for each of them, the elements of each rank's block; None where they are equal.
            op: how to reduce.
            prescale: factor of what goes in.
            postscale: factor of what comes out.
            name: what it is.
            timeout_s: deadline.
        """

    @abstractmethod
    def allgather_async(
        self,
        array: Array,
        out: Array,
        *,
        counts: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """Put the ``array`` of every rank into ``out``, in order of rank.

        Args:
            array: the block of this rank; may be its own place in ``out``.
            out: as many elements as all blocks together; same dtype.
            counts: elements of each rank's block, the same on every rank; equal blocks when None.
            name: what it is.
            timeout_s: deadline.
        """

    @abstractmethod
    def allgather_group_async(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        *,
        counts: Sequence[Sequence[int] | None] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """:meth:`allgather` of several arrays of one dtype as one operation, which costs about what one array would.

        Args:
            arrays: the blocks of this rank; each may be its own place in its ``out``, but in no other one.
            outs: for each of them, what all ranks' blocks go to.
            counts: for each of them, the elements of each rank's block; None where they are equal.
            name: what it is.
            timeout_s: deadline.
        """

    @abstractmethod
    def broadcast_async(
        self, array: Array, *, root: int, name: str = "", timeout_s: float | None = None
    ) -> Handle:
        """Copy rank ``root``'s ``array`` into that of every other rank."""

    @abstractmethod
    def reduce_async(
        self,
        array: Array,
        *,
        root: int,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """Reduce ``array`` over all ranks into rank ``root``'s; the other ranks keep theirs."""

    @abstractmethod
    def gather_async(
        self,
        array: Array,
        out: Array | None,
        *,
        root: int,
        counts: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """As :meth:`allgather`, but only rank ``root`` gets the blocks; elsewhere ``out`` is None."""

    @abstractmethod
    def scatter_async(
        self,
        array: Array | None,
        out: Array,
        *,
        root: int,
        counts: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """Give block r of rank ``root``'s ``array`` to rank r's ``out``; elsewhere ``array`` is None.

        ``counts`` as for :meth:`allgather`.
        """

    @abstractmethod
    def alltoall_async(
        self,
        array: Array,
        out: Array,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
    ) -> Handle:
        """Send block r of ``array`` to rank r, whose ``out`` takes the blocks that it gets in order of rank.

        Args:
            array: the blocks for all ranks one after another.
            out: the blocks of all ranks one after another; same dtype; another memory.
            send_counts: elements of each block of ``array``; equal blocks when None.
            receive_counts: elements of each block of ``out``: what the ranks send to this one. Both or none.
            name: what it is.
            timeout_s: deadline.
        """

    @abstractmethod
    def barrier_async(self, *, name: str = "", timeout_s: float | None = None) -> Handle:
        """Wait until every rank is here."""

    @abstractmethod
    def join(self, *, timeout_s: float | None = None) -> int:
        """Say that this rank has no more data, and take part in what the others do until all have said so.

        Meanwhile this rank contributes zeros to their ``allreduce`` (an average is over all ranks all the same),
        ``reduce_scatter`` and ``allgather`` of equal blocks (of a group, where each rank has as much of all arrays
        together), and takes part in their ``barrier``; any other operation ends as a mismatch that says who has joined.

        Returns:
            The rank that joined last, the highest if there were several.
        """

    @abstractmethod
    def send_async(
        self, array: Array, *, to: int, tag: int = 0, timeout_s: float | None = None
    ) -> MessageHandle:
        """Send ``array`` to a rank, which must ``recv`` as many elements of the same dtype."""

    @abstractmethod
    def recv_async(
        self, array: Array, *, source: int | None, tag: int = 0, timeout_s: float | None = None
    ) -> MessageHandle:
        """Receive into ``array`` what a rank sends with this tag; in its order of sending.

        With ``source=None`` it is what any rank sends with this tag, and ``source`` of the handle says who that was.
        Where one receive names a rank and another does not, with the same tag at the same time, either may get what
        this rank sends.
        """

    allreduce = _blocking(allreduce_async)
    allreduce_group = _blocking(allreduce_group_async)
    reduce_scatter = _blocking(reduce_scatter_async)
    reduce_scatter_group = _blocking(reduce_scatter_group_async)
    allgather = _blocking(allgather_async)
    allgather_group = _blocking(allgather_group_async)
    broadcast = _blocking(broadcast_async)
    reduce = _blocking(reduce_async)
    gather = _blocking(gather_async)
    scatter = _blocking(scatter_async)
    alltoall = _blocking(alltoall_async)
    barrier = _blocking(barrier_async)
    send = _blocking(send_async)
    recv = _blocking(recv_async)

    def allocate(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Memory for arrays that :meth:`allreduce` reduces where they lie, without a copy.

        All ranks call this in the same order with the same size, and lay out their arrays alike. It is shared by the
        ranks of a host, as long as all ranks are on one; otherwise it is ordinary memory.

        Args:
            num_bytes: how much this rank needs.

        Returns:
            Zeros, shape ``(num_bytes,)``; the memory is given back when nothing refers to it any more.

        Raises:
            CommunicatorError: if the memory cannot be had; the message says what is there.
        """
        return np.zeros(num_bytes, np.uint8)

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make every operation fail with ``reason``, here and on all peers; returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is queued and leave; the peers do not take this for a death. May be called again."""

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()


class Handle(Protocol):
    """An operation under way; it keeps its buffers alive until it is complete."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the operation is complete.

        Args:
            timeout_s: seconds to wait at most; the operation's own deadline when None.

        Raises:
            CommunicatorError: what the operation failed with.
        """

    def done(self) -> bool:
        """Say at once whether the operation is complete, well or not."""


class MessageHandle(Handle, Protocol):
    """A message under way.

    Attributes:
        source: the rank that sends it; for a message from any rank, -1 until it comes.
    """

    source: int

    def when_done(self, action: Callable[[], None]) -> None:
        """Call something, on any thread, as soon as the message is complete, well or not; it must return at once."""
