"""
The data path of the collectives: shared memory inside a host, TCP rings across hosts.

It opens no sockets and resolves no names: it is handed connected, authenticated descriptors.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Handle:
    """
    An operation that was submitted. Its arrays stay alive until it is done.
    """

    def wait(self, timeout_s: float | None = None) -> None:
        """
        Return once the operation is done, and raise its error if it failed.

        Raises CommunicatorTimeoutError if it is not done after timeout_s seconds; it then continues and can be waited for again.
        """

    def done(self) -> bool:
        """
        Whether the operation has finished or failed; its arrays are then free to use.
        """

class Monitor:
    """
    What can be told of a communicator's operations, also when it is closed.

    Times are integers in nanoseconds, points in time those of time.monotonic_ns(); 0 stands for one that was not taken.
    """

    def totals(self) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """
        Of each kind of operation: kind, count, failed, bytes, time busy, of that waiting for other ranks to join, time queued before, and of the time busy that in which the caller was blocked.
        """

    def lateness(self) -> list[tuple[int, int, int]]:
        """
        The ranks of this host that this rank waited for last: rank, how often, how long.
        """

    def arrivals(self) -> list[tuple[int, int]]:
        """
        Number and time of this rank's coming to each of the latest operations, if the communicator spans hosts.
        """

    def start_recording(self, max_records: int) -> None:
        """Write operations down, the latest max_records until they are taken."""

    def stop_recording(self) -> None:
        """Write no more down."""

    def take_records(self) -> tuple[list[tuple[int, str, str, int, str, bool, int, int, int, int, int, int]], int]:
        """
        What was written down, and how many earlier records had to go.

        A record: number, kind, name, bytes, dtype, whether it ended well, the times when it was queued, begun, waiting for others, joined by all and done, and the rank that came last, -1 if nobody was waited for.
        """

    def take_stall(self) -> tuple[int, str, float, str] | None:
        """
        The news of an operation that makes no progress, once: its number, what it is, the seconds waited, and who is missing.
        """

    def waits(self) -> list[tuple[str, float, float]]:
        """
        The operation in which nothing has moved for 0.2 s or longer, if there is one: what it is, the seconds waited, and its timeout_s.
        """

class Communicator:
    """
    The open group of ranks, seen from one of them.

    Arrays are buffers in CPU memory: NumPy arrays, torch tensors and whatever else speaks DLPack or the buffer protocol; those that are not C-contiguous are copied. float32, float64, bfloat16, float16, all integers and bool can be reduced, by 'sum', 'avg', 'min', 'max' or 'product'; bfloat16 and float16 accumulate in float32, integer sums wrap, integer averages round toward zero.

    counts: elements of each rank's block, the same on all ranks; equal blocks when None. All ranks must give the same name.

    timeout_s, in seconds, replaces the communicator's own for one operation. After an operation failed, all later ones raise the same error.
    """

    def __init__(self, *, rank: int, host_of_rank: Sequence[int], segment_fd: int, lane_fds: tuple[int, int], lifeline_fds: tuple[int, int], timeout_s: float, wire: str = 'float32', stall_warning_s: float | None = None, stall_abort_s: float | None = None, stall_fd: int = -1) -> None:
        """
        Take over the descriptors of one rank, whatever the outcome.

        host_of_rank has the host of every rank, numbered by first appearance. segment_fd is -1 if the rank is alone on its host, lane_fds (to the next host, from the previous one) are (-1, -1) if it owns no lane, lifeline_fds (to the next rank, from the previous one) in a world of one. timeout_s is the default deadline of every operation, in seconds. wire says how sums and averages of float32 travel between hosts: as float32, bfloat16 or float16, the same on all ranks; they are added up in float32. An operation in which nothing has moved for stall_warning_s has its news ready in the monitor, of which stall_fd, an eventfd, tells; after stall_abort_s it fails.
        """

    def allreduce(self, array: object, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """Reduce array over all ranks, in place; every rank gets the same bits."""

    def allreduce_async(self, array: object, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def allreduce_group(self, arrays: Sequence[object], op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """allreduce of several arrays of one dtype as one operation."""

    def allreduce_group_async(self, arrays: Sequence[object], op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def reduce(self, array: object, root: int, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """
        Reduce array over all ranks, into the root's; the other ranks keep theirs.
        """

    def reduce_async(self, array: object, root: int, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def reduce_scatter(self, array: object, out: object, counts: Sequence[int] | None = None, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """
        Reduce array, the blocks of all ranks, over all ranks; block r goes to rank r's out, which may be that block of array.
        """

    def reduce_scatter_async(self, array: object, out: object, counts: Sequence[int] | None = None, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def reduce_scatter_group(self, arrays: Sequence[object], outs: Sequence[object], counts: Sequence[Sequence[int] | None] | None = None, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """reduce_scatter of several arrays of one dtype as one operation."""

    def reduce_scatter_group_async(self, arrays: Sequence[object], outs: Sequence[object], counts: Sequence[Sequence[int] | None] | None = None, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def allgather(self, array: object, out: object, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """
        Gather every rank's array into out, in order of ranks. array may be this rank's block of out.
        """

    def allgather_async(self, array: object, out: object, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def allgather_group(self, arrays: Sequence[object], outs: Sequence[object], counts: Sequence[Sequence[int] | None] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """allgather of several arrays of one dtype as one operation."""

    def allgather_group_async(self, arrays: Sequence[object], outs: Sequence[object], counts: Sequence[Sequence[int] | None] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def broadcast(self, array: object, root: int, name: str = '', timeout_s: float | None = None) -> None:
        """Copy rank root's array to all ranks, in place."""

    def broadcast_async(self, array: object, root: int, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def gather(self, array: object, out: object | None, root: int, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """
        Gather every rank's array into the root's out, which is None elsewhere.
        """

    def gather_async(self, array: object, out: object | None, root: int, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def scatter(self, array: object | None, out: object, root: int, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """
        Give block r of the root's array, which is None elsewhere, to rank r's out.
        """

    def scatter_async(self, array: object | None, out: object, root: int, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def alltoall(self, array: object, out: object, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """
        Send block r of array to rank r; out takes the blocks of all ranks in order of ranks.
        """

    def alltoall_async(self, array: object, out: object, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def barrier(self, name: str = '', timeout_s: float | None = None) -> None:
        """Return once all ranks have called it."""

    def barrier_async(self, name: str = '', timeout_s: float | None = None) -> Handle:
        """Queue it, in the order of the calls."""

    def join(self, timeout_s: float | None = None) -> int:
        """
        Take part with zeros in what the others do, until all have called this; return the rank that did so last.
        """

    def add_arena(self, fd: int, part_bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """
        Map memory that the ranks of this host share, part_bytes for each of them, and return this rank's part. Arrays that lie at the same place in every rank's part are reduced without copies. The descriptor stays the caller's.
        """

    def abort(self, reason: str) -> None:
        """
        Make every operation here and on all peers fail with the reason; returns at once.
        """

    def close(self) -> None:
        """
        Wait for what is queued, at most the default timeout, then leave. Can be called again.
        """

    @property
    def monitor(self) -> Monitor:
        """What can be told of the operations."""

    @property
    def failure(self) -> str | None:
        """Why the communicator failed; None while it has not."""

class NcclLibrary:
    """NCCL and the CUDA driver, loaded."""

    def __init__(self, nccl: Sequence[str], cuda: Sequence[str]) -> None:
        """
        Load the first of the names or paths of each that can be opened.

        Raises CommunicatorError with what was tried.
        """

    @property
    def path(self) -> str:
        """The file that was taken."""

    @property
    def version(self) -> str:
        """Such as '2.27.6'."""

    def unique_id(self) -> bytes:
        """An id by which ranks find each other: made by one, given to all."""

    def gpu_id(self, gpu: int) -> tuple[str, str]:
        """Uuid and bus address of a GPU that this process sees."""

class NcclOperation:
    """
    An operation of NCCL on memory of the GPU, given by its address.

    input may equal output; for reduce_scatter and allgather it may be this rank's block of the other. factor, for sums, is one element as bytes that every rank's input is multiplied by.
    """

    @staticmethod
    def allreduce(input: int, output: int, count: int, dtype: str, op: str = 'sum', factor: bytes = ...) -> NcclOperation:
        """Reduce count elements over all ranks; all get the result."""

    @staticmethod
    def reduce_scatter(input: int, output: int, count: int, dtype: str, op: str = 'sum', factor: bytes = ...) -> NcclOperation:
        """
        Reduce world_size blocks of count elements over all ranks; rank r gets block r.
        """

    @staticmethod
    def reduce(input: int, output: int, count: int, dtype: str, root: int, op: str = 'sum', factor: bytes = ...) -> NcclOperation:
        """Reduce count elements over all ranks; the root gets the result."""

    @staticmethod
    def allgather(input: int, output: int, count: int, dtype: str) -> NcclOperation:
        """Gather every rank's block of count elements, in order of ranks."""

    @staticmethod
    def broadcast(input: int, output: int, count: int, dtype: str, root: int) -> NcclOperation:
        """Give every rank the root's count elements."""

    @staticmethod
    def send(input: int, count: int, dtype: str, to: int) -> NcclOperation:
        """Send to a rank, which must receive as much."""

    @staticmethod
    def recv(output: int, count: int, dtype: str, source: int) -> NcclOperation:
        """Receive what a rank sends."""

    def __repr__(self) -> str: ...

class NcclCommunicator:
    """A communicator of NCCL, one GPU per rank. No call waits for data."""

    def __init__(self, *, library: NcclLibrary, gpu: int, unique_id: bytes, rank: int, world_size: int, name: str, timeout_s: float) -> None:
        """
        Begin to open it; all ranks do so with one unique_id, and then wait_ready.

        timeout_s is how long close may take, in seconds.
        """

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait for the end of opening or splitting; False if that takes longer."""

    def split(self, color: int | None, key: int, *, rank: int, world_size: int, name: str, timeout_s: float) -> NcclCommunicator | None:
        """
        Begin to split off the ranks with this color, in the order of their keys.

        All ranks make this call; one without a color gets None.
        """

    def run(self, operations: Sequence[NcclOperation], stream: int, timeout_s: float) -> int:
        """
        Put operations on a stream (a cudaStream_t as an integer) as one group.

        Returns their common number. They are to be complete within timeout_s seconds, or the communicator fails.
        """

    def done(self, number: int) -> bool:
        """Whether this number and all before it are complete on the GPU."""

    def wait(self, number: int, timeout_s: float) -> None:
        """
        Block until done. CommunicatorTimeoutError if that takes longer; it then continues.
        """

    @property
    def busy(self) -> bool:
        """Whether anything is known to be under way."""

    def abort(self, reason: str) -> None:
        """
        End what is under way on this rank and refuse what follows; returns at once.
        """

    def close(self) -> None:
        """Wait for what is under way, then leave. Can be called again."""

    @property
    def failure(self) -> str | None:
        """Why it failed; None if it did not."""

def describe_dlpack(capsule: object) -> tuple[int, int, str, bool, int, int]:
    """
    Address, elements, dtype, whether C-contiguous, DLPack's device type and device of what __dlpack__ returned. Consumes the capsule; the array is to be kept.
    """

def segment_bytes(local_size: int) -> int:
    """
    How many bytes the zero-filled segment must have that local_size ranks of a host share.
    """

def arena_part_bytes(num_bytes: int) -> int:
    """
    How many bytes an arena must have for each rank, to hold num_bytes of its own.
    """
