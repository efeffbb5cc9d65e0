"""Common part of all operations of a communicator over MPI: signatures, plans, and the agreement of the ranks.

A signature describes one rank's call of an operation: all its arguments except the data. Signatures are made and
compared without communication. A plan is an operation to carry out; every operation has a blocking and a queued form.

Before they carry out an operation, the ranks compare their signatures. They add up three numbers per rank, which costs
one small allreduce, regardless of the world size. The signatures themselves are exchanged only if the sums show that
the ranks do not agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.buffers import item_bytes
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.mpi.library import load_mpi
from sparkdl.collective.operation_queue import OperationQueue
from sparkdl.collective.telemetry.monitor import OperationMonitor
from sparkdl.errors import MismatchError, ParamError
from sparkdl.rendezvous.deadline import check_timeout
from sparkdl.topology import group_ranks, name_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparkdl.collective.buffers import FlatBuffer
    from sparkdl.collective.communicator import Handle
    from sparkdl.collective.opening import Opening
    from sparkdl.topology import Topology

    Data = np.ndarray[Any, Any]

    Steps = Generator[MPI.Request, None, None]
    """An operation: each step is a request to complete before the next one is taken. Keeps its buffers alive."""


MODULUS = 2**64
"""Digests and balances are numbers below this, and are added modulo this."""

JOIN = "join"
"""Kind of the signature of a rank that has no more data."""

_WITHOUT_JOINED = ("allreduce", "reduce_scatter", "allgather", "barrier")
"""Operations in which joined ranks take part, if all blocks are equal."""

_OF_BLOCKS = ("reduce_scatter", "allgather", "gather", "scatter")
"""Operations whose size is that of one rank's block."""

_SHOWN = 32
"""Number of sizes of a long list that a message shows."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One rank's call of an operation, without the data.

    Attributes:
        kind: name of the communicator's method.
        name: the user's name of the operation.
        dtype: dtype of the elements.
        size: number of elements of the array, of all arrays of a group, or of one rank's block.
        shape: shape of a named array that has more than one dimension; shape of a row if the ranks have blocks.
        arrays: number of elements of each array of a group.
        blocks: number of elements of each rank's block; empty if they are equal.
        array_blocks: for each array of a group with blocks, the number of elements of each rank's block.
        op: reduction.
        prescale: factor applied to the inputs.
        postscale: factor applied to the results.
        root: root rank; -1 if the operation has none.
        sends: number of elements for each rank, in an alltoall.
        receives: number of elements from each rank, in an alltoall.
        joined_at: number of the operation at which the rank joined, for :data:`JOIN`.
    """

    kind: str
    name: str = ""
    dtype: str = ""
    size: int = 0
    shape: tuple[int, ...] = ()
    arrays: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    array_blocks: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    joined_at: int = -1

    def __str__(self) -> str:
        """The operation in words: ``allreduce 'grad' of 10 float32 by sum``."""
        text = f"{self.kind} {self.name!r}" if self.name else self.kind
        if self.arrays:
            text += f" of {self.size} {self.dtype} in arrays of {_list(self.arrays)}"
        elif self.sends and len({*self.sends, *self.receives}) > 1:
            text += f" of {self.dtype} in blocks of {_list(self.sends)} for blocks of {_list(self.receives)}"
        elif self.array_blocks:
            size = "" if self.blocks else f"{self.size} "
            arrays = ", ".join(f"({_list(blocks)})" for blocks in self.array_blocks[:_SHOWN])
            text += f" of {size}{self.dtype} in arrays of blocks {arrays}"
        elif self.blocks:
            text += f" of {self.dtype} in blocks of {_list(self.blocks)}"
        elif self.dtype:
            text += f" of {self.size} {self.dtype}"
        if self.shape:
            text += f" {'in rows of' if self.kind in _OF_BLOCKS else 'of shape'} ({_list(self.shape)})"
        if self.op:
            text += f" by {self.op}"
        if self.prescale != 1.0:
            text += f", prescale {self.prescale:g}"
        if self.postscale != 1.0:
            text += f", postscale {self.postscale:g}"
        if self.root >= 0:
            text += f" {'to' if self.kind in ('reduce', 'gather') else 'from'} rank {self.root}"
        return text

    @property
    def digest(self) -> int:
        """64 bits that differ if ranks disagree. Does not cover the sizes that a rank of an alltoall sends or gets."""
        return _digest(replace(self, sends=(), receives=()) if self.sends else self)

    def num_bytes(self, world_size: int) -> int:
        """Return the bytes of the array, or of the blocks of all ranks together."""
        if not self.dtype:
            return 0
        elements = sum(self.sends or self.blocks) or self.size * (
            world_size if self.kind in _OF_BLOCKS else 1
        )
        return elements * item_bytes(self.dtype)

    def balance(self, rank: int) -> int:
        """Return 64 bits that add up to zero modulo 2**64 over all ranks if the sizes of sends and receives match."""
        if not self.sends:
            return 0
        world_size = len(self.sends)
        others = np.arange(world_size, dtype=np.uint64)
        sent = _mix(others + np.uint64(rank * world_size), self.sends)
        received = _mix(others * np.uint64(world_size) + np.uint64(rank), self.receives)
        return (int(sent.sum()) - int(received.sum())) % MODULUS

    def to_bytes(self) -> bytes:
        """Encode the signature for other ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Signature:
        """Decode the result of :meth:`to_bytes`."""
        values: dict[str, Any] = json.loads(data)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(tuple(item) if isinstance(item, list) else item for item in value)
        return cls(**values)


def agree_on_signature(signatures: Sequence[Signature], number: int) -> Signature:
    """Return the signature on which all ranks that have not joined agree; the first rank's if all have joined.

    Args:
        signatures: signatures of all ranks, in order of rank.
        number: number of the operation, for the error message.

    Raises:
        MismatchError: if the ranks disagree, or the operation is not possible while other ranks have joined.
    """
    active = [signature for signature in signatures if signature.kind != JOIN]
    if not active:
        return signatures[0]
    agreed = active[0]
    is_possible = len(active) == len(signatures) or (agreed.kind in _WITHOUT_JOINED and not agreed.blocks)
    if not is_possible or any(signature.digest != agreed.digest for signature in active):
        said = group_ranks(enumerate(map(str, signatures)))
        who_said_what = "; ".join(f"{name_ranks(ranks)} said {text}" for text, ranks in said.items())
        raise MismatchError(f"the ranks disagree about operation {number}: {who_said_what}")
    if agreed.sends:
        _check_exchange(signatures)
    return agreed


def check_block_counts(counts: Sequence[int], world_size: int, what: str) -> tuple[int, ...]:
    """Return the number of elements of each rank's block as Python integers.

    Raises:
        ParamError: if there is not one number for each rank, or one is negative.
    """
    plain = tuple(int(count) for count in counts)
    if len(plain) != world_size or min(plain) < 0:
        raise ParamError(
            f"{what} [{_list(plain)}] are not the sizes of {world_size} blocks, one for each rank"
        )
    return plain


def _check_exchange(signatures: Sequence[Signature]) -> None:
    for source, signature in enumerate(signatures):
        for to, sent in enumerate(signature.sends):
            expected = signatures[to].receives[source]
            if sent != expected:
                raise MismatchError(
                    f"the ranks disagree about {signature.kind}"
                    f"{f' {signature.name!r}' * bool(signature.name)}: rank {source}"
                    f" sends {sent} elements to rank {to}, which expects {expected}"
                )


def _list(counts: Sequence[int]) -> str:
    shown = ", ".join(map(str, counts[:_SHOWN]))
    return (
        shown if len(counts) <= _SHOWN else f"{shown}, and {len(counts) - _SHOWN} more, {sum(counts)} in all"
    )


# Training repeats the same few operations.
@lru_cache(maxsize=4096)
def _digest(signature: Signature) -> int:
    said = repr([getattr(signature, field.name) for field in fields(signature)])
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")


def _mix(keys: np.ndarray[Any, Any], counts: Sequence[int]) -> np.ndarray[Any, Any]:
    """Spread pairs of key and count over 64 bits, by splitmix64 (https://doi.org/10.1145/2660193.2660195)."""
    bits = keys * np.uint64(0x9E3779B97F4A7C15) + np.array(counts, np.uint64) * np.uint64(0xD1342543DE82EF95)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


_PIECE = 1 << 28
"""Largest number of elements in one call of MPI: libraries without MPI-4 count in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class MpiPlan:
    """An operation to carry out.

    Attributes:
        signature: signature on which the ranks have to agree.
        steps: function that starts the operation, once they agree; by default there is nothing to do then.
        buffers: arrays that the operation reads or writes.
    """

    signature: Signature
    steps: Callable[[], Iterable[MPI.Request]] = tuple
    buffers: Sequence[FlatBuffer] = ()


class MpiOperations(Communicator):
    """Common base of all operations over MPI: the MPI communicator, and the queue of operations."""

    def __init__(self, comm: MPI.Intracomm, opening: Opening, topology: Topology) -> None:
        super().__init__(opening, topology)
        self._comm, self._mpi = comm, load_mpi()
        self._operations = OperationMonitor()
        self._queue = OperationQueue(opening.name, self._operations.blocked)

    def _check_blocks(
        self, whole: FlatBuffer | None, block: FlatBuffer, counts: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Check that ``whole`` holds the blocks of all ranks, and ``block`` is the block of this rank.

        Returns:
            Number of elements of each block; empty if all blocks have the size of this rank's.

        Raises:
            ParamError: if the dtypes of the arrays differ, or their sizes do not match the blocks.
        """
        size, world_size = block.data.size, self.world_size
        blocks = (size,) * world_size if counts is None else check_block_counts(counts, world_size, "counts")
        if blocks[self.rank] != size:
            raise ParamError(f"rank {self.rank} has {size} elements, but counts say {blocks[self.rank]}")
        if whole is not None and (whole.dtype, whole.data.size) != (block.dtype, sum(blocks)):
            raise ParamError(
                f"{whole.data.size} elements of {whole.dtype} are not {world_size} blocks of"
                f" {sum(blocks)} elements of {block.dtype} together"
            )
        # Equal blocks are the same operation with and without counts.
        return blocks if len(set(blocks)) > 1 else ()

    def _check_root(self, root: int) -> int:
        if not 0 <= root < self.world_size:
            raise ParamError(f"root {root} is outside a world of {self.world_size} ranks")
        return root


def both_forms(plan: Callable[..., MpiPlan]) -> tuple[Callable[..., Handle], Callable[..., None]]:
    """Return two methods for the operation of ``plan``: one queues it, the other blocks until it is complete.

    Both take the arguments of ``plan``, and ``timeout_s``: seconds until the operation fails; the communicator's
    deadline when None. The blocking method runs the operation on the caller's thread if none is queued. They raise a
    :class:`~sparkdl.errors.ParamError` if the timeout is not valid.
    """

    def prepare(
        self: Any, /, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Callable[[], None]:
        if timeout_s is not None:
            check_timeout(timeout_s)
        planned = plan(self, *args, **kwargs)
        return partial(self._drive, self._agree_and_move(planned), planned.signature, timeout_s)

    @wraps(plan)
    def queue(self: Any, /, *args: Any, **kwargs: Any) -> Handle:
        handle: Handle = self._queue.submit(prepare(self, *args, **kwargs))
        return handle

    @wraps(plan)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> None:
        self._queue.run(prepare(self, *args, **kwargs))

    return queue, run


def shape_to_agree_on(name: str, buffer: FlatBuffer, *, rows: bool = False) -> tuple[int, ...]:
    """Return the dimensions that a named array must have on all ranks; without the first one if ``rows``."""
    if not name or len(buffer.shape) < 2:
        return ()
    return buffer.shape[1:] if rows else buffer.shape


def signature_of(kind: str, name: str, buffer: FlatBuffer, **how: Any) -> Signature:
    """Return the signature of an operation on one array of equal size on all ranks; ``how`` has further fields."""
    size, shape = buffer.data.size, shape_to_agree_on(name, buffer)
    return Signature(kind=kind, name=name, dtype=buffer.dtype, size=size, shape=shape, **how)


def for_mpi(data: Data) -> Data:
    """Return the array as MPI takes it: a copy if its elements are not aligned to their size."""
    if not data.size:
        # An empty array may have the address of another one, which MPI takes for one buffer passed twice.
        return np.empty(0, data.dtype)
    return data if data.flags.aligned else data.copy()


@contextmanager
def written_by_mpi(data: Data) -> Iterator[Data]:
    """Context manager like :func:`for_mpi`, for an array that MPI writes: a copy is written back at the end."""
    taken = for_mpi(data)
    yield taken
    if taken is not data:
        data[:] = taken


def pieces(data: Any) -> list[Any]:
    """Split an array, or an object with size and slices, into pieces that MPI can count; empty for an empty array."""
    return [data[start : start + _PIECE] for start in range(0, data.size, _PIECE)]


class MpiAgreement:
    """Checks that all ranks call the same operation. Its buffers serve all operations, which run one at a time.

    Args:
        comm: MPI communicator of all ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._rank, self._world_size = comm.Get_rank(), comm.Get_size()
        self._mine = np.zeros(3, np.uint64)
        self._sums = np.zeros(3, np.uint64)
        self.signatures: list[Signature] = []

    def reach(self, signature: Signature, number: int) -> Generator[MPI.Request, None, Signature]:
        """Return, after some steps, the signature on which all ranks agree, as :func:`agree_on_signature` does.

        Each step is a request to complete before the next one is taken. If the signatures of the ranks differ, or ranks
        have joined, ``signatures`` holds the signatures of all ranks afterwards.

        Raises:
            MismatchError: on every rank, if the ranks disagree.
        """
        if self._world_size == 1:
            self.signatures = [signature]
            return signature
        self._mine[:] = signature.digest, signature.balance(self._rank), signature.kind == JOIN
        yield self._comm.Iallreduce(self._mine, self._sums)
        # Equal digests add up to a multiple of the digest; different ones do so once in 2**64 mismatches.
        if self._sums.tolist() == [signature.digest * self._world_size % MODULUS, 0, 0]:
            return signature
        self.signatures = yield from self._exchange(signature)
        return agree_on_signature(self.signatures, number)

    def _exchange(self, signature: Signature) -> Generator[MPI.Request, None, list[Signature]]:
        mine = np.frombuffer(signature.to_bytes(), np.uint8)
        lengths = np.empty(self._world_size, np.int64)
        yield self._comm.Iallgather(np.array([mine.size]), lengths)
        joined = np.empty(lengths.sum(), np.uint8)
        yield self._comm.Iallgatherv(mine, [joined, lengths.tolist()])
        ends = np.cumsum(lengths)
        parts = zip(ends - lengths, ends, strict=True)
        return [Signature.from_bytes(joined[start:end].tobytes()) for start, end in parts]
