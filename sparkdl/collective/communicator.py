"""The contract of every communicator, and of the handles that its asynchronous operations return.

Arrays are buffers in CPU memory: NumPy arrays, or anything with ``__dlpack__`` such as torch tensors. Their elements
are float32, float64, float16, bfloat16, int8 to int64, uint8 to uint64, or bool, taken in row-major order. An array
that is not C-contiguous is copied: when the operation begins if the operation reads it, and back after the operation
has succeeded if the operation writes it.

Reductions: ``op`` is ``"sum"``, ``"avg"``, ``"min"``, ``"max"`` or ``"product"``. float16 and bfloat16 are
accumulated in float32 and rounded once; the sum of bools is their logical "or", the product their logical "and".
``prescale`` multiplies the inputs, ``postscale`` the results; integers are multiplied as float64 and rounded toward
zero.

Sums and products of integers wrap around. Averages of integers are rounded toward zero. Integers of 8 to 32 bits are
averaged in a wider type. int64 and uint64 have no wider type: where the sum does not fit, the average is that of the
wrapped sum. Convert such numbers to float64 first.

A NaN on any rank is both the minimum and the maximum, and makes every sum, average and product NaN. For the minimum or
maximum of 0.0 and -0.0, the native transport takes the one that comes later in its order of the ranks; over MPI, -0.0
is below 0.0. All ranks get the same bits, with one exception: over MPI, the sign and the payload of a NaN that is a
sum, an average or a product may differ.

``name`` identifies the operation in error messages and reports. The ranks must agree on the name, the operation, dtype,
sizes, reduction, scales and root: otherwise all of them raise the same :class:`MismatchError`, nothing is written, and
the communicator can still be used.

Every operation has a deadline: ``timeout_s``, or the communicator's own. After any failure other than a mismatch the
communicator cannot be used any more. All ranks must call the same operations in the same order, except that messages
(``send`` and ``recv``) are ordered only within a pair of ranks and a tag.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import Counter
from contextlib import AbstractContextManager
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, cast

import numpy as np

from sparkdl.checks import check_counts
from sparkdl.closing import Closing
from sparkdl.collective.telemetry.communication_report import (
    CommunicationReport,
    WorldReport,
    gather_world_report,
    make_report,
)
from sparkdl.collective.telemetry.timeline import Timeline
from sparkdl.errors import CommunicatorError, ParamError, SparkdlError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from sparkdl import _native
    from sparkdl.collective.mpi.messages import MpiMessages
    from sparkdl.collective.native.point_to_point import NativeMessages
    from sparkdl.collective.opening import Opening
    from sparkdl.collective.operation_queue import FutureHandle
    from sparkdl.collective.telemetry.monitor import OperationMonitor, Telemetry
    from sparkdl.collective.telemetry.stalls import StallCheck
    from sparkdl.collective.telemetry.timeline import More
    from sparkdl.topology import Topology

logger = logging.getLogger(__name__)

_LAST_TIMELINE_S = 10.0
"""How long a closing rank waits for the other ranks, which may not be closing."""

_LOOK_S = 0.02
"""Pause between two polls of the failure, which only operations raise."""

P = ParamSpec("P")

Array = Any
"""A buffer in CPU memory; see the docstring of this module."""


def _blocking(start: Callable[Concatenate[Any, P], Handle]) -> Callable[Concatenate[Any, P], None]:
    """Return the blocking form of an asynchronous operation: it starts the operation and waits for the result.

    Raises:
        MismatchError: on every rank, if the ranks disagree; the message lists the call of each rank.
        CommunicatorTimeoutError: if some rank does not join in time; the message names it.
        RankLostError: if a rank has died; the message names it.
        CommunicatorAbortedError: if a rank aborted; the message gives the reason.
    """

    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        getattr(self, start.__name__)(*args, **kwargs).wait()

    update_wrapper(run, start)
    vars(run).pop("__isabstractmethod__", None)  # the blocking form is not abstract
    return run


class Communicator(AbstractContextManager["Communicator"]):
    """The open group of ranks. A context manager: closes on success, aborts on exception.

    Every operation has two forms with the same arguments: ``x`` blocks until the result is available, ``x_async``
    returns a handle at once. The operations of a rank run in the order of its calls.

    Attributes:
        is_member: True; False in a :class:`~sparkdl.collective.communicator.NonMember`.
        transport: transport that carries the data: ``"native"`` or ``"mpi"``.
        rank: number of this rank in the communicator.
        world_size: number of ranks of the communicator.
        topology: which ranks share a host, regardless of the transport.
        name: name of the communicator in messages.
        rendezvous: store over which the communicator was opened.
        secret: the job's secret.
        requested_transport: argument ``transport`` of the opening; process sets use it, too.
        open_other: function that opens another communicator, with the arguments of
            :func:`~sparkdl.collective.opening.open_communicator`.
        timeout_s: default deadline of every operation, in seconds.
        wire: format in which sums and averages of float32 travel between hosts.
        stall_check: when operations that some ranks do not join are reported.
        monitors: monitors of this communicator's operations, and of its messages.
        telemetry: the monitors of this communicator and of its process sets.
        timeline: timeline that was started on this communicator and is running; None if there is none.
        world_ranks: world rank of each rank, its number in the communicator from which all others of the family were
            split. Reports and timelines use these numbers.
    """

    is_member = True
    transport: str
    monitors: tuple[_native.Monitor | OperationMonitor, OperationMonitor]
    _messages: NativeMessages | MpiMessages

    def __init__(self, opening: Opening, topology: Topology) -> None:
        self.topology = topology
        self.rank, self.world_size = topology.rank, topology.world_size
        self.name = opening.name
        self.rendezvous = opening.rendezvous
        self.secret = opening.secret
        self.requested_transport = opening.transport
        self.open_other = opening.open
        self.timeout_s = opening.timeout_s
        self.wire = opening.wire
        self.stall_check = opening.stall_check
        self.telemetry = opening.telemetry
        self.world_ranks = opening.world_ranks
        self._own_rendezvous = opening.own_rendezvous
        self._num_opened: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.timeline: Timeline | None = None

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why the communicator cannot be used any more; None while it can be used."""

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
        """:meth:`allreduce` of several arrays of one dtype as one operation, at about the cost of one array."""

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
            array: blocks of all ranks, one after another; this rank's block may be ``out`` itself.
            out: memory for the reduced block of this rank; same dtype.
            counts: number of elements of each rank's block, the same list on every rank; equal blocks when None.
            op: reduction: ``"sum"``, ``"avg"``, ``"min"``, ``"max"`` or ``"product"``.
            prescale: factor applied to the inputs.
            postscale: factor applied to the results.
            name: name of the operation in error messages and reports, the same on every rank.
            timeout_s: seconds until the operation fails; the communicator's deadline when None.
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
        """:meth:`reduce_scatter` of several arrays of one dtype as one operation, at about the cost of one array.

        Args:
            arrays: each holds the blocks of all ranks, one after another; this rank's block may be the ``out`` of the
                same array, but not of another one.
            outs: for each array, memory for the reduced block of this rank.
            counts: for each array, the number of elements of each rank's block; None for equal blocks.
            op: reduction: ``"sum"``, ``"avg"``, ``"min"``, ``"max"`` or ``"product"``.
            prescale: factor applied to the inputs.
            postscale: factor applied to the results.
            name: name of the operation in error messages and reports, the same on every rank.
            timeout_s: seconds until the operation fails; the communicator's deadline when None.
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
            array: block of this rank; may be this rank's block of ``out``.
            out: memory for the blocks of all ranks, one after another; same dtype.
            counts: number of elements of each rank's block, the same list on every rank; equal blocks when None.
            name: name of the operation in error messages and reports, the same on every rank.
            timeout_s: seconds until the operation fails; the communicator's deadline when None.
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
        """:meth:`allgather` of several arrays of one dtype as one operation, at about the cost of one array.

        Args:
            arrays: blocks of this rank; each may be this rank's block of its own ``out``, but not of another one.
            outs: for each array, memory for the blocks of all ranks, one after another.
            counts: for each array, the number of elements of each rank's block; None for equal blocks.
            name: name of the operation in error messages and reports, the same on every rank.
            timeout_s: seconds until the operation fails; the communicator's deadline when None.
        """

    @abstractmethod
    def broadcast_async(
        self, array: Array, *, root: int, name: str = "", timeout_s: float | None = None
    ) -> Handle:
        """Copy the ``array`` of rank ``root`` into the ``array`` of every other rank."""

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
        """Reduce ``array`` over all ranks into the ``array`` of rank ``root``; other ranks keep their elements."""

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
        """Like :meth:`allgather`, but only rank ``root`` gets the blocks; ``out`` is None on the other ranks."""

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
        """Copy block r of rank ``root``'s ``array`` into rank r's ``out``; ``array`` is None on the other ranks.

        ``counts`` has the same meaning as in :meth:`allgather`.
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
        """Send block r of ``array`` to rank r, and receive a block from every rank into ``out``, in order of rank.

        Args:
            array: blocks for all ranks, one after another.
            out: memory for the blocks from all ranks, one after another; same dtype; must not overlap ``array``.
            send_counts: number of elements of each block of ``array``; equal blocks when None.
            receive_counts: number of elements of each block of ``out``, which the ranks send to this one. Pass both
                counts or neither.
            name: name of the operation in error messages and reports, the same on every rank.
            timeout_s: seconds until the operation fails; the communicator's deadline when None.
        """

    @abstractmethod
    def barrier_async(self, *, name: str = "", timeout_s: float | None = None) -> Handle:
        """Wait until every rank has made this call."""

    @abstractmethod
    def join(self, *, timeout_s: float | None = None) -> int:
        """Declare that this rank has no more data, and take part in the others' operations until all ranks have joined.

        Until then this rank takes part in ``barrier`` and contributes zeros to ``allreduce`` (an average is still over
        all ranks) and to ``reduce_scatter`` and ``allgather`` of equal blocks (for a group of arrays: if the blocks of
        all arrays together are of the same size on every rank). Any other operation raises a :class:`MismatchError`
        that names the ranks that have joined.

        Returns:
            The rank that joined last, the highest if there were several.
        """

    def send_async(
        self, array: Array, *, to: int, tag: int = 0, timeout_s: float | None = None
    ) -> FutureHandle:
        """Send ``array`` to rank ``to``, which must ``recv`` the same number of elements of the same dtype."""
        return self._messages.queue("send", array, to, tag, timeout_s)

    def recv_async(
        self, array: Array, *, source: int | None, tag: int = 0, timeout_s: float | None = None
    ) -> FutureHandle:
        """Receive a message with this tag from rank ``source`` into ``array``; in the order of sending.

        With ``source=None`` the message may come from any rank; ``source`` of the handle is the sender. If a receive
        from one rank and a receive from any rank wait for the same tag at the same time, either of them may get the
        message of that rank.
        """
        return self._messages.queue("recv", array, source, tag, timeout_s)

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
        """Allocate memory for arrays that :meth:`allreduce` reduces in place, without a copy.

        All ranks must call this in the same order with the same size, and place their arrays at the same offsets. If
        all ranks are on one host, they share the memory, as far as ``/dev/shm`` has room; otherwise it is ordinary
        memory, for which collectives are correct, too, but copy.

        Args:
            num_bytes: size of this rank's memory, in bytes.

        Returns:
            Zeros, uint8, shape ``(num_bytes,)``; the memory is released with the last reference to it.

        Raises:
            CommunicatorError: if the memory cannot be allocated; the message says how much is available.
        """
        return np.zeros(num_bytes, np.uint8)

    def split(
        self, ranks: Sequence[int], name: str, *, stall_check: StallCheck | None = None
    ) -> Communicator:
        """Open a process set: a communicator of some ranks of this one. Only these ranks need to call it.

        Args:
            ranks: the members; their order gives their ranks in the process set.
            name: distinguishes process sets of the same ranks that are opened at the same time.
            stall_check: when operations that some ranks do not join are reported; this communicator's when None.

        Returns:
            The process set, to be closed by the caller. On a rank that is not a member, its ``is_member`` is False, and
            every operation but ``close`` raises a :class:`~sparkdl.errors.ParamError` that names the members.

        Raises:
            ParamError: if ``ranks`` is empty, has duplicates, or names a rank that does not exist.
        """
        members = list(ranks)
        outside = [rank for rank in members if not 0 <= rank < self.world_size]
        if not members or outside or len(set(members)) != len(members):
            raise ParamError(
                f"process set {name!r} has ranks {members}: they must be distinct and within"
                f" 0 to {self.world_size - 1}, and there must be at least one"
            )
        if self.rank not in members:
            return cast("Communicator", NonMember(rank=self.rank, name=name, members=members))
        return self._open(members, name, stall_check or self.stall_check, self.telemetry)

    def _duplicate(self, name: str) -> Communicator:
        """Open a communicator of the same ranks that is not observed; collective."""
        return self._open(list(range(self.world_size)), name, self.stall_check, None)

    def _open(
        self, members: list[int], name: str, stall_check: StallCheck, telemetry: Telemetry | None
    ) -> Communicator:
        self._num_opened[name, tuple(members)] += 1
        number = self._num_opened[name, tuple(members)]
        return self.open_other(
            rendezvous=self.rendezvous,
            rank=members.index(self.rank),
            world_size=len(members),
            secret=self.secret,
            transport=self.requested_transport,
            timeout_s=self.timeout_s,
            name=f"{self.name}/{name}",
            host_of_rank=self.topology.hosts_of(members),
            own_rendezvous=self._own_rendezvous.view(f"set/{name}/{members}/{number}"),
            wire=self.wire,
            stall_check=stall_check,
            telemetry=telemetry,
            world_ranks=[self.world_ranks[rank] for rank in members],
        )

    def report(self, *, reset: bool = False) -> CommunicationReport:
        """Return the report of this rank on this communicator and its process sets.

        Operations are always counted; the report needs no communication. :meth:`gather_report` returns the reports of
        all ranks.

        Args:
            reset: whether to set the counts to zero afterwards.
        """
        return make_report(self.world_ranks[self.rank], *self.telemetry.measure(reset=reset))

    def gather_report(self) -> WorldReport | None:
        """Return the reports of all ranks on rank 0, with the ranks that came last; None elsewhere. Collective."""
        with self._duplicate("report") as duplicate:
            return gather_world_report(self, duplicate)

    def start_timeline(
        self, path: str | os.PathLike[str], *, max_events: int = 65536, is_live: bool = False
    ) -> None:
        """Begin to record the operations of this communicator and of its process sets.

        All ranks must call it. :meth:`stop_timeline`, or closing the communicator, writes one file for all ranks in the
        Trace Event Format, which https://ui.perfetto.dev opens.

        Args:
            path: path of the file, on rank 0's machine; an existing file is replaced.
            max_events: number of operations that every rank keeps for each communicator, the latest ones.
            is_live: whether rank 0 writes its own operations to the file many times a second while the timeline runs.

        Raises:
            ParamError: if a timeline is already running, or rank 0 cannot write the file.
        """
        if self.timeline is not None:
            raise ParamError(f"a timeline of {self.name!r} runs already; stop it first")
        check_counts(least=1, max_events=max_events)
        duplicate = self._duplicate("timeline")
        try:
            self.timeline = Timeline(
                duplicate, self.telemetry, Path(path), max_events=max_events, is_live=is_live
            )
        except BaseException:
            duplicate.close()
            raise

    def stop_timeline(self, *, timeout_s: float | None = None, more: More | None = None) -> None:
        """End the timeline and write its file. All ranks must call it.

        If ranks were lost meanwhile, the file has the records of the others, and a warning is logged.

        Args:
            timeout_s: seconds for each step; the communicator's deadline when None.
            more: returns further events of this rank for the file; None for none.

        Raises:
            ParamError: if no timeline is running, or rank 0 cannot write the file.
        """
        timeline, self.timeline = self.timeline, None
        if timeline is None:
            raise ParamError(f"no timeline of {self.name!r} runs; start one first")
        timeline.stop(timeout_s=timeout_s, more=more)

    def drop_timeline(self) -> None:
        """End a running timeline of this rank without a file and without the other ranks."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.drop()

    def _end_timeline(self) -> None:
        """End a running timeline; transports call this first when they close."""
        if self.timeline is None:
            return
        try:
            self.stop_timeline(timeout_s=_LAST_TIMELINE_S)
        except SparkdlError as error:
            logger.warning("The timeline that was running could not be written: %s", error)

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make every operation fail with ``reason``, on this rank and on all others; returns at once."""

    def has_failed_within(self, timeout_s: float) -> bool:
        """Whether the communicator has failed, or fails within ``timeout_s``.

        When its ranks cannot reach each other by another way, it finds out shortly which rank died or aborted.
        """
        deadline = Deadline(timeout_s)
        while self.failure is None and not deadline.expired:
            time.sleep(_LOOK_S)
        return self.failure is not None

    def error(self) -> CommunicatorError:
        """Return this communicator's failure, which every operation raises."""
        try:
            self.barrier()
        except CommunicatorError as error:
            return error
        raise AssertionError(f"a failed communicator took part in a barrier: {self.failure}")

    @abstractmethod
    def close(self) -> None:
        """Finish the queued operations and leave; other ranks do not treat this as a loss. May be called again."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()


class NonMember(Closing):
    """Placeholder for a process set on a rank that is not in it: can be closed; any other use raises an error.

    Args:
        rank: number of this rank in the communicator that was split.
        name: name of the process set.
        members: ranks of the process set, by their numbers in the communicator that was split.

    Attributes:
        is_member: always False.
    """

    is_member = False

    def __init__(self, *, rank: int, name: str, members: Sequence[int]) -> None:
        self._who = f"rank {rank} is not in process set {name!r} of {name_ranks(members)}"

    def close(self) -> None:
        """Do nothing."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ParamError(f"{self._who}: {attribute!r} is for its members. Ask is_member before.")


class Handle(Protocol):
    """An operation under way; it keeps its buffers alive until it is complete."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the operation is complete.

        Args:
            timeout_s: seconds to wait at most; the operation's own deadline when None.

        Raises:
            CommunicatorError: if the operation failed; the subclass says how.
        """

    def done(self) -> bool:
        """Return at once whether the operation has succeeded or failed."""
