"""The contract of every communicator. Runs on ranks.

Arrays are C-contiguous buffers in CPU memory: NumPy arrays, or anything with ``__dlpack__`` such as torch
tensors. Their elements are float32, float64, float16, bfloat16, int8 to int64, uint8 to uint64, or bool.

Reductions: ``op`` is ``"sum"``, ``"avg"``, ``"min"``, ``"max"`` or ``"product"``. float16 and bfloat16 are
accumulated in float32 and rounded once; the sum and the product of bools are their "or" and "and". ``prescale``
multiplies what goes in, ``postscale`` what comes out; integers are multiplied as float64 and rounded toward zero.

Sums and products of integers wrap around. Averages of integers are rounded toward zero. Those of 8 to 32 bits are added
up in a wider type; for int64 and uint64 there is none: where the sum does not fit, the average is that of the sum that
wrapped around. Convert such numbers to float64 first.

A NaN on any rank is both the minimum and the maximum, and makes every sum, average and product NaN. Of 0.0 and -0.0
the native transport takes the one that comes later in its order of the ranks; over MPI, -0.0 is below 0.0. The ranks
end with the same bits but for one case: the sign and the payload of a NaN that is a sum, an average or a product over
MPI.

``name`` says what is communicated. It stands in messages and reports, and the ranks must agree on it, as they must
on operation, dtype, sizes, reduction, scales and root: otherwise all of them raise the same :class:`MismatchError`,
nothing is written, and the communicator can be used further.

Every operation has a deadline, ``timeout_s`` or the communicator's own. After any other failure than those above
the communicator is of no further use. All ranks must call the same operations in the same order, except that
messages (``send`` and ``recv``) are ordered by pair and tag alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np

from sparkdl.collective.observation import Observed
from sparkdl.collective.opening import Opening, open_communicator
from sparkdl.collective.rendezvous import PrefixRendezvous
from sparkdl.errors import ParamError
from sparkdl.topology import number_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from sparkdl.collective.handle import Handle
    from sparkdl.collective.stalls import StallCheck
    from sparkdl.collective.telemetry import Telemetry
    from sparkdl.topology import Topology

P = ParamSpec("P")

Array = Any
"""A C-contiguous CPU buffer; see the head of this module."""


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


class Communicator(Observed, ABC):
    """The open group of ranks. A context manager: closes on success, aborts on exception.

    An operation is there twice: ``x`` blocks until its result is there, ``x_async`` returns a handle at once and
    takes the same arguments. Operations of one rank run in the order of its calls.

    Attributes:
        topology: which ranks share a host, whatever carries the data between them.
        name: what the communicator is called in messages.
        rendezvous: the store it was opened over.
        secret: the job's secret.
        requested_transport: the ``transport`` that it was opened with; what a process set should be opened with.
        timeout_s: default deadline of every operation, in seconds.
        wire: how sums and averages of float32 travel between hosts.
        stall_check: when ranks that do not join an operation are reported.
    """

    def __init__(self, opening: Opening, topology: Topology) -> None:
        self.topology = topology
        self.name = opening.name
        self.rendezvous = opening.rendezvous
        self.secret = opening.secret
        self.requested_transport = opening.transport
        self.timeout_s = opening.timeout_s
        self._own_rendezvous = opening.own_rendezvous
        self._num_splits: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.wire = opening.wire
        self.stall_check = opening.stall_check
        Observed.__init__(self, opening.telemetry, opening.world_ranks)

    @property
    @abstractmethod
    def transport(self) -> str:
        """What carries the data: ``"native"`` or ``"mpi"``."""

    @property
    def takes_device_memory(self) -> bool:
        """Whether :meth:`send` and :meth:`recv` also take a :class:`~sparkdl.collective.device_array.DeviceArray`.

        What is on a stream is not waited for: the caller does, and so for what a received array is used for.
        """
        return False

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why the communicator cannot be used any more; None as long as it can."""

    @property
    def rank(self) -> int:
        """Number of this rank in the communicator."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """How many ranks the communicator has."""
        return self.topology.world_size

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
        ``reduce_scatter`` and ``allgather`` of equal blocks, and takes part in their ``barrier``; any other operation
        ends as a mismatch that says who has joined.

        Returns:
            The rank that joined last, the highest if there were several.
        """

    @abstractmethod
    def send_async(self, array: Array, *, to: int, tag: int = 0, timeout_s: float | None = None) -> Handle:
        """Send ``array`` to a rank, which must ``recv`` as many elements of the same dtype."""

    @abstractmethod
    def recv_async(
        self, array: Array, *, source: int, tag: int = 0, timeout_s: float | None = None
    ) -> Handle:
        """Receive into ``array`` what a rank sends with this tag; in its order of sending."""

    allreduce = _blocking(allreduce_async)
    allreduce_group = _blocking(allreduce_group_async)
    reduce_scatter = _blocking(reduce_scatter_async)
    allgather = _blocking(allgather_async)
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

    def split(
        self, ranks: Sequence[int], name: str, *, stall_check: StallCheck | None = None
    ) -> Communicator | None:
        """Open a process set: a communicator of some ranks of this one. Only these ranks need to call it.

        Args:
            ranks: the members; their order gives their ranks in the process set.
            name: distinguishes process sets of the same ranks that are opened at the same time.
            stall_check: when ranks that do not join are reported; as in this communicator when None.

        Returns:
            The process set, to be closed by the caller; None on a rank that is not in it, which takes no part in
            its operations and therefore has nothing to call them on: ask ``is None`` before.

        Raises:
            ParamError: if ``ranks`` is empty, has duplicates, or names a rank that does not exist.
        """
        members = list(ranks)
        outside = [rank for rank in members if not 0 <= rank < self.world_size]
        if not members or outside or len(set(members)) != len(members):
            raise ParamError(
                f"process set {name!r} has ranks {members}: they must be distinct and within"
                f" 0 to {self.world_size - 1}, and there must be one at least"
            )
        if self.rank not in members:
            return None
        return self._open_subset(members, name, stall_check=stall_check, telemetry=self.telemetry)

    def _open_subset(
        self, members: list[int], name: str, *, stall_check: StallCheck | None, telemetry: Telemetry | None
    ) -> Communicator:
        self._num_splits[name, tuple(members)] += 1
        number = self._num_splits[name, tuple(members)]
        return open_communicator(
            rendezvous=self.rendezvous,
            rank=members.index(self.rank),
            world_size=len(members),
            secret=self.secret,
            transport=self.requested_transport,
            timeout_s=self.timeout_s,
            name=f"{self.name}/{name}",
            host_of_rank=self.hosts_of(members),
            own_rendezvous=PrefixRendezvous(self._own_rendezvous, f"set/{name}/{members}/{number}"),
            wire=self.wire,
            stall_check=stall_check or self.stall_check,
            telemetry=telemetry,
            world_ranks=[self.world_ranks[rank] for rank in members],
        )

    def _open_aside(self, name: str) -> Communicator:
        everybody = list(range(self.world_size))
        return self._open_subset(everybody, name, stall_check=None, telemetry=None)

    def hosts_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The hosts of some ranks of this communicator, numbered anew by first appearance."""
        return number_hosts([self.topology.host_of_rank[rank] for rank in ranks])

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()
