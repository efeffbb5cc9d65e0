"""What the operations of a communicator over MPI have in common: a plan, and its blocking and its queued form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np

from sparkdl.collective.claims import check_counts
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.deadline import check_timeout
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

    from sparkdl.collective.claims import Claim
    from sparkdl.collective.flat_buffers import FlatBuffer
    from sparkdl.collective.handle import Handle
    from sparkdl.collective.turns import Turns

    Data = np.ndarray[Any, Any]

    Steps = Generator[MPI.Request, None, None]
    """An operation: each step is a request to be completed before the next is taken. Holds its buffers."""

P = ParamSpec("P")

_PIECE = 1 << 28
"""Elements in one call of MPI: libraries without MPI-4 count in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An operation that a rank was asked for.

    Attributes:
        claim: what the ranks have to agree on.
        steps: begins it, once they have.
        buffers: the arrays that it works on.
        timeout_s: its deadline; the communicator's own when None.

    Raises:
        ParamError: if that is no time to wait.
    """

    claim: Claim
    steps: Callable[[], Steps]
    buffers: Sequence[FlatBuffer] = ()
    timeout_s: float | None

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            check_timeout(self.timeout_s)


class MpiOperations(Communicator):
    """What the groups of operations build on."""

    _comm: MPI.Intracomm
    _mpi: ModuleType
    _turns: Turns

    @abstractmethod
    def _carry_out(self, plan: Plan) -> None:
        """Agree with the other ranks, and take the steps."""

    def _check_blocks(
        self, whole: FlatBuffer | None, block: FlatBuffer, counts: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Check that an array holds blocks of all ranks, and another one is this rank's.

        Returns:
            The elements of each block if they differ, none if all are like this rank's.

        Raises:
            ParamError: if the arrays' elements differ, or they do not hold as many as they should.
        """
        size, world_size = block.data.size, self.world_size
        blocks = (size,) * world_size if counts is None else check_counts(counts, world_size, "counts")
        if blocks[self.rank] != size:
            raise ParamError(f"rank {self.rank} has {size} elements, but counts say {blocks[self.rank]}")
        if whole is not None and (whole.dtype, whole.data.size) != (block.dtype, sum(blocks)):
            raise ParamError(
                f"{whole.data.size} elements of {whole.dtype} are not {world_size} blocks of"
                f" {sum(blocks)} elements of {block.dtype} together"
            )
        # Equal blocks are the same operation however they were said.
        return blocks if len(set(blocks)) > 1 else ()

    def _check_root(self, root: int) -> int:
        if not 0 <= root < self.world_size:
            raise ParamError(f"root {root} is outside a world of {self.world_size} ranks")
        return root


def both_forms(
    plan: Callable[Concatenate[Any, P], Plan],
) -> tuple[Callable[Concatenate[Any, P], Handle], Callable[Concatenate[Any, P], None]]:
    """The method that queues what ``plan`` plans, and the one that carries it out on the caller's thread."""

    @wraps(plan)
    def queue(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        handle: Handle = self._turns.submit(partial(self._carry_out, plan(self, *args, **kwargs)))
        return handle

    @wraps(plan)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._turns.run(partial(self._carry_out, plan(self, *args, **kwargs)))

    return queue, run


def shape_to_agree_on(name: str, buffer: FlatBuffer, *, rows: bool = False) -> tuple[int, ...]:
    """The dimensions that a named array must have on all ranks: all but the first where each has its own rows."""
    if not name or len(buffer.shape) < 2:
        return ()
    return buffer.shape[1:] if rows else buffer.shape


def for_mpi(data: Data) -> Data:
    """The array as MPI takes it: a copy if its elements are not at multiples of their size."""
    if not data.size:
        # Empty arrays may share an address with others, which MPI takes for one buffer given twice.
        return np.empty(0, data.dtype)
    return data if data.flags.aligned else data.copy()


@contextmanager
def written_by_mpi(data: Data) -> Iterator[Data]:
    """As :func:`for_mpi`, for an array that MPI writes; a copy is written back at the end."""
    taken = for_mpi(data)
    yield taken
    if taken is not data:
        data[:] = taken


def pieces(data: Any) -> list[Any]:
    """The array, or whatever has a size and slices, cut for MPI; nothing of an empty one."""
    return [data[start : start + _PIECE] for start in range(0, data.size, _PIECE)]
