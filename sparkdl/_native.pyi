"""
The data path of the collectives: shared memory inside a host, TCP rings across hosts.

It opens no sockets and resolves no names: it is handed connected, authenticated descriptors.
"""

from collections.abc import Sequence


class Handle:
    """
    An operation that was submitted. Its arrays stay alive until it is done.
    """

    def wait(self, timeout_s: float | None = None) -> None:
        """
        Return once the operation is done, and raise its error if it failed.

        Raises CommunicatorTimeoutError if it is not done after timeout_s seconds; it then goes on and can be waited for again.
        """

    def done(self) -> bool:
        """
        Whether the operation has finished or failed; its arrays are then free to use.
        """

class Communicator:
    """
    The open group of ranks, seen from one of them.

    Arrays are C-contiguous buffers in CPU memory: NumPy arrays, torch tensors and whatever else speaks DLPack or the buffer protocol. float32, float64, bfloat16, float16, int32, int64 and uint8 can be reduced, by 'sum', 'avg', 'min', 'max' or 'product'; bfloat16 and float16 accumulate in float32, integer sums wrap, integer averages round toward zero.

    timeout_s, in seconds, replaces the communicator's own for one operation. After an operation failed, all later ones raise the same error.
    """

    def __init__(self, *, rank: int, host_of_rank: Sequence[int], segment_fd: int, lane_fds: tuple[int, int], lifeline_fds: tuple[int, int], timeout_s: float) -> None:
        """
        Take over the descriptors of one rank; a ValueError leaves them with the caller.

        host_of_rank has the host of every rank, numbered by first appearance. segment_fd is -1 if the rank is alone on its host, lane_fds (to the next host, from the previous one) are (-1, -1) if it owns no lane, lifeline_fds (to the next rank, from the previous one) in a world of one. timeout_s is the default deadline of every operation, in seconds.
        """

    def allreduce(self, array: object, op: str = 'sum', timeout_s: float | None = None) -> None:
        """Reduce array over all ranks, in place; every rank gets the same bits."""

    def reduce_scatter(self, array: object, out: object, op: str = 'sum', timeout_s: float | None = None) -> None:
        """
        Reduce array, world_size blocks as large as out, over all ranks; block r goes to rank r's out. out may be that block of array.
        """

    def allgather(self, array: object, out: object, timeout_s: float | None = None) -> None:
        """
        Gather every rank's array into out, world_size blocks in order of ranks. array may be this rank's block of out.
        """

    def broadcast(self, array: object, root: int, timeout_s: float | None = None) -> None:
        """Copy rank root's array to all ranks, in place."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once all ranks have called it."""

    def allreduce_async(self, array: object, op: str = 'sum', timeout_s: float | None = None) -> Handle:
        """Queue allreduce; operations run in the order of submission."""

    def reduce_scatter_async(self, array: object, out: object, op: str = 'sum', timeout_s: float | None = None) -> Handle:
        """Queue reduce_scatter."""

    def allgather_async(self, array: object, out: object, timeout_s: float | None = None) -> Handle:
        """Queue allgather."""

    def broadcast_async(self, array: object, root: int, timeout_s: float | None = None) -> Handle:
        """Queue broadcast."""

    def barrier_async(self, timeout_s: float | None = None) -> Handle:
        """Queue barrier."""

    def abort(self, reason: str) -> None:
        """
        Make every operation here and on all peers fail with the reason; returns at once.
        """

    def close(self) -> None:
        """
        Wait for what is queued, at most the default timeout, then leave. Can be called again.
        """

    @property
    def failure(self) -> str | None:
        """Why the communicator failed; None while it has not."""

def segment_bytes(local_size: int) -> int:
    """
    How many bytes the zero-filled segment must have that local_size ranks of a host share.
    """
