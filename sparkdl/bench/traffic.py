"""How many bytes of memory each rank reads and writes in an allreduce, as the contenders' algorithms have it.

Counts what passes through the processor, cached or not. A plain copy of S bytes moves 2 S.
"""

from __future__ import annotations

from collections.abc import Callable

# What a TCP connection over loopback costs per byte sent: it is read and written by the sender's kernel call, and
# by the receiver's.
_LOOPBACK_BYTES_PER_BYTE_SENT = 4

# Adding a byte that was received to one's own: two are read, one is written.
_BYTES_PER_BYTE_ADDED = 3

# native/src/shm/shm_group.cc: up to here, over all ranks, everybody adds everything; two ranks always do with float32.
_ONE_ROUND_BYTES = 32 * 1024


def bytes_moved(contender: str, num_bytes: int, num_tensors: int, world_size: int) -> int | None:
    """Bytes per rank for so many tensors of ``num_bytes``; None where the algorithm is not known to us."""
    formula = _FORMULAS.get(contender)
    return None if formula is None else round(num_tensors * formula(num_bytes, world_size))


def _copy(num_bytes: int, _: int) -> float:
    return 2 * num_bytes


def _shared_memory(num_bytes: int, world_size: int) -> float:
    """One shot of little and of two ranks: copy in, add all. Else two: slices are copied in, added, and fetched."""
    if world_size == 2 or num_bytes * world_size <= _ONE_ROUND_BYTES:
        return num_bytes * (2 + world_size + 1)
    own = num_bytes / world_size
    others = num_bytes - own
    copied_in, copied_out = 2 * others, 2 * others
    added = world_size * own + own
    pushed = 2 * own
    return copied_in + added + pushed + copied_out


def _shared_arena(num_bytes: int, _: int) -> float:
    """Everybody's part of a slice is read, and the sum is written to everybody's."""
    return 2 * num_bytes


def _ring_over_loopback(num_bytes: int, world_size: int) -> float:
    """Gloo's: a ring reduce-scatter and a ring allgather, each of which sends all but one of the blocks."""
    sent_per_pass = num_bytes * (world_size - 1) / world_size
    return sent_per_pass * (2 * _LOOPBACK_BYTES_PER_BYTE_SENT + _BYTES_PER_BYTE_ADDED)


# MPI and Horovod are not among them: what they do depends on the library, its version and the size.
_FORMULAS: dict[str, Callable[[int, int], float]] = {
    "copy": _copy,
    "native": _shared_memory,
    "arena": _shared_arena,
    "torch": _shared_memory,
    "gloo": _ring_over_loopback,
    "gloo tuned": _ring_over_loopback,
}
