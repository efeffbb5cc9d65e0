"""
The data path of the collectives: shared memory within a host, TCP rings between hosts; and the columns of a feed as one matrix.

It opens no sockets and resolves no names: it receives connected, authenticated descriptors.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Handle:
    """A submitted operation. Its arrays stay alive until it is done."""

    def wait(self, timeout_s: float | None = None) -> None:
        """
        Wait until the operation is done, and raise its error if it failed.

        Raises CommunicatorTimeoutError if the operation is not done after timeout_s seconds; it then continues and can be waited for again.
        """

    def done(self) -> bool:
        """
        Whether the operation has finished or failed; its arrays can then be used again.
        """

class Monitor:
    """
    Measurements of a communicator's operations; available also after it is closed.

    Times are integers in nanoseconds; points in time are those of time.monotonic_ns(). 0 stands for a time that was not measured.
    """

    def totals(self) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """
        Totals of each kind of operation: kind, number of operations, number of failed ones, bytes, busy time, part of it spent waiting for other ranks to join, time queued before, and part of the busy time in which a thread of the caller was blocked.
        """

    def lateness(self) -> list[tuple[int, int, int]]:
        """
        Ranks of this host that were the last that this rank waited for: rank, number of operations, total waiting time.
        """

    def arrivals(self) -> list[tuple[int, int]]:
        """
        Number of each of the latest operations, and time at which this rank joined it, if the communicator spans hosts.
        """

    def start_recording(self, max_records: int) -> None:
        """
        Begin to record operations; the latest max_records are kept until they are taken.
        """

    def stop_recording(self) -> None:
        """Stop recording operations."""

    def take_records(self) -> tuple[list[tuple[int, str, str, int, str, bool, int, int, int, int, int, int]], int]:
        """
        Remove and return the records of operations, and the number of dropped ones.

        A record has number, kind, name, bytes, dtype, whether the operation succeeded, the times at which it was queued, began, waited for other ranks, had been joined by all ranks and was done, and the rank that joined last, -1 if this rank did not wait or does not know it.
        """

    def take_stall(self) -> tuple[int, str, float, str] | None:
        """
        Remove and return the notice about an operation without progress, if there is one: its number, its description, the seconds waited, and which ranks are missing.
        """

    def waits(self) -> list[tuple[str, float, float]]:
        """
        The operation that has made no progress for 0.2 s or longer, if there is one: its description, the seconds waited, and its timeout_s.
        """

class Communicator:
    """
    The open group of ranks, seen from one of them.

    Arrays are buffers in CPU memory: NumPy arrays, torch tensors and other objects that support DLPack or the buffer protocol; those that are not C-contiguous are copied. float32, float64, bfloat16, float16, all integers and bool can be reduced, by 'sum', 'avg', 'min', 'max' or 'product'. bfloat16 and float16 accumulate in float32, integer sums wrap, and integer averages round toward zero.

    counts: number of elements of each rank's block, the same on all ranks; None if the blocks are equal. name: name of the operation, the same on all ranks.

    timeout_s replaces the communicator's timeout for one operation, in seconds. After an operation has failed for another reason than a mismatch, all later ones raise the same error.
    """

    def __init__(self, *, rank: int, host_of_rank: Sequence[int], segment_fd: int, lane_fds: tuple[int, int], lifeline_fds: tuple[int, int], timeout_s: float, wire: str = 'float32', stall_warning_s: float | None = None, stall_abort_s: float | None = None, stall_fd: int = -1) -> None:
        """
        Take ownership of the descriptors of one rank, even if an error is raised.

        Args:
            rank: this rank.
            host_of_rank: host index of every rank, hosts numbered by first appearance.
            segment_fd: the host's shared segment; -1 if the rank is alone on its host.
            lane_fds: sockets to the next host and from the previous one; (-1, -1) if the rank owns no lane.
            lifeline_fds: sockets to the next rank and from the previous one; (-1, -1) in a world of one.
            timeout_s: default timeout of every operation, in seconds.
            wire: format in which sums and averages of float32 travel between hosts: 'float32', 'bfloat16' or 'float16', the same on all ranks. They are always accumulated in float32.
            stall_warning_s: seconds after which the monitor reports an operation without progress; None: never.
            stall_abort_s: seconds after which an operation without progress fails; None: never.
            stall_fd: eventfd that is written to when the monitor reports an operation; -1: none.
        """

    def allreduce(self, array: object, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """Reduce array over all ranks, in place; every rank gets the same bits."""

    def allreduce_async(self, array: object, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def allreduce_group(self, arrays: Sequence[object], op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """Run allreduce on several arrays of one dtype as one operation."""

    def allreduce_group_async(self, arrays: Sequence[object], op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def reduce(self, array: object, root: int, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """
        Reduce array over all ranks into the root's array; the other ranks keep theirs.
        """

    def reduce_async(self, array: object, root: int, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def reduce_scatter(self, array: object, out: object, counts: Sequence[int] | None = None, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """
        Reduce array, which has a block for each rank, over all ranks. Block r goes to rank r's out, which may be that block of array.
        """

    def reduce_scatter_async(self, array: object, out: object, counts: Sequence[int] | None = None, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def reduce_scatter_group(self, arrays: Sequence[object], outs: Sequence[object], counts: Sequence[Sequence[int] | None] | None = None, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> None:
        """Run reduce_scatter on several arrays of one dtype as one operation."""

    def reduce_scatter_group_async(self, arrays: Sequence[object], outs: Sequence[object], counts: Sequence[Sequence[int] | None] | None = None, op: str = 'sum', prescale: float = 1.0, postscale: float = 1.0, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def allgather(self, array: object, out: object, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """
        Gather every rank's array into out, in rank order. array may be this rank's block of out.
        """

    def allgather_async(self, array: object, out: object, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def allgather_group(self, arrays: Sequence[object], outs: Sequence[object], counts: Sequence[Sequence[int] | None] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """Run allgather on several arrays of one dtype as one operation."""

    def allgather_group_async(self, arrays: Sequence[object], outs: Sequence[object], counts: Sequence[Sequence[int] | None] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def broadcast(self, array: object, root: int, name: str = '', timeout_s: float | None = None) -> None:
        """Copy the root's array to the arrays of all ranks."""

    def broadcast_async(self, array: object, root: int, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def gather(self, array: object, out: object | None, root: int, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """
        Gather every rank's array into the root's out; out is None on the other ranks.
        """

    def gather_async(self, array: object, out: object | None, root: int, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def scatter(self, array: object | None, out: object, root: int, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """
        Copy block r of the root's array to rank r's out; array is None on the other ranks.
        """

    def scatter_async(self, array: object | None, out: object, root: int, counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def alltoall(self, array: object, out: object, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> None:
        """
        Send block r of array to rank r; out receives the blocks of all ranks in rank order.
        """

    def alltoall_async(self, array: object, out: object, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def barrier(self, name: str = '', timeout_s: float | None = None) -> None:
        """Return once all ranks have called barrier."""

    def barrier_async(self, name: str = '', timeout_s: float | None = None) -> Handle:
        """
        Queue the operation and return its handle. Operations run in the order of the calls.
        """

    def join(self, timeout_s: float | None = None) -> int:
        """
        Take part with zeros in the operations of the other ranks until all ranks have called join; return the rank that called it last.
        """

    def add_arena(self, fd: int, part_bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """
        Map memory that the ranks of this host share, with part_bytes for each of them, and return this rank's part. Arrays that lie at the same offset in every rank's part are reduced without copies. The caller keeps the descriptor.
        """

    def abort(self, reason: str) -> None:
        """
        Make every operation on this rank and on all peers fail with the reason. Returns at once.
        """

    def close(self) -> None:
        """
        Wait for queued operations, at most the default timeout, then leave. Repeated calls do nothing.
        """

    @property
    def monitor(self) -> Monitor:
        """Measurements of the operations."""

    @property
    def failure(self) -> str | None:
        """Reason why the communicator failed; None if it has not failed."""

class NcclLibrary:
    """NCCL and the CUDA driver, loaded at run time."""

    def __init__(self, nccl: Sequence[str], cuda: Sequence[str]) -> None:
        """
        Load from each list the first name or path that can be opened.

        Raises CommunicatorError, which says what was tried.
        """

    @property
    def path(self) -> str:
        """Path of the loaded NCCL library."""

    @property
    def version(self) -> str:
        """Version of NCCL, such as '2.27.6'."""

    def unique_id(self) -> bytes:
        """Create the id of a communicator. One rank creates it for all."""

    def gpu_id(self, gpu: int) -> tuple[str, str]:
        """Uuid and bus address of a GPU that this process sees."""

class NcclOperation:
    """
    An NCCL operation on GPU memory, which is given by its address.

    input may equal output; for reduce_scatter and allgather the smaller buffer may be this rank's block of the larger one. factor: one element, as bytes. A sum multiplies every rank's input by it.
    """

    @staticmethod
    def allreduce(input: int, output: int, count: int, dtype: str, op: str = 'sum', factor: bytes = ...) -> NcclOperation:
        """Reduce count elements over all ranks; every rank gets the result."""

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
        """Gather every rank's block of count elements, in rank order."""

    @staticmethod
    def broadcast(input: int, output: int, count: int, dtype: str, root: int) -> NcclOperation:
        """Copy the root's count elements to all ranks."""

    @staticmethod
    def send(input: int, count: int, dtype: str, to: int) -> NcclOperation:
        """Send count elements to a rank, which must receive as many."""

    @staticmethod
    def recv(output: int, count: int, dtype: str, source: int) -> NcclOperation:
        """Receive count elements from a rank."""

    def __repr__(self) -> str: ...

class NcclCommunicator:
    """An NCCL communicator, one GPU per rank. run does not wait for data."""

    def __init__(self, *, library: NcclLibrary, gpu: int, unique_id: bytes, rank: int, world_size: int, name: str, timeout_s: float) -> None:
        """
        Begin to open the communicator. All ranks do so with the same unique_id, and then call wait_ready.

        timeout_s: longest time that close may take, in seconds.
        """

    def wait_ready(self, timeout_s: float) -> bool:
        """
        Wait until opening or splitting is complete; return False if that takes longer than timeout_s.
        """

    def split(self, color: int | None, key: int, *, rank: int, world_size: int, name: str, timeout_s: float) -> NcclCommunicator | None:
        """
        Begin to split off a communicator of the ranks with the same color, ordered by their keys.

        All ranks must make this call; a rank without a color gets None. rank, world_size and name are those in the new communicator.
        """

    def run(self, operations: Sequence[NcclOperation], stream: int, timeout_s: float, after: int | None = None) -> int:
        """
        Put operations on a stream (a cudaStream_t as an integer) as one group, and return the number of the group.

        If they are not complete within timeout_s seconds, the communicator fails. They also follow the work that is on the stream after, if one is given.
        """

    def join(self, number: int, stream: int) -> None:
        """
        Make later work on a stream follow the group with this number. Returns at once.
        """

    def done(self, number: int) -> bool:
        """
        Whether the group with this number and all before it are complete on the GPU.
        """

    def wait(self, number: int, timeout_s: float) -> None:
        """
        Wait until done(number). Raises CommunicatorTimeoutError if that takes longer than timeout_s seconds; the operations then continue.
        """

    @property
    def busy(self) -> bool:
        """Whether any operation is known to be in progress."""

    def abort(self, reason: str) -> None:
        """
        Abort the operations in progress on this rank and make later calls fail. Returns at once.
        """

    def close(self) -> None:
        """
        Wait for the operations in progress, then leave. Repeated calls do nothing.
        """

    @property
    def failure(self) -> str | None:
        """Reason why the communicator failed; None if it has not failed."""

def describe_dlpack(capsule: object) -> tuple[int, int, str, bool, int, int]:
    """
    Return address, number of elements, dtype, whether C-contiguous, DLPack's device type and device id of the array in a capsule that __dlpack__ returned. Consumes the capsule; the caller must keep the array alive.
    """

def join_columns(columns: Sequence[object], matrix: object) -> None:
    """
    Write arrays of one dimension into the columns of a C-contiguous matrix of their dtype, without the GIL.
    """

def segment_bytes(local_size: int) -> int:
    """
    Return the size in bytes of the zero-filled segment that local_size ranks of a host share.
    """

def arena_part_bytes(num_bytes: int) -> int:
    """
    Return the size in bytes of each rank's part of an arena, for num_bytes of the rank's own arrays.
    """
