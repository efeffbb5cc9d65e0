"""Has the ranks of an MPI communicator compare what they are about to do, before they do it. Runs on ranks.

Three numbers per rank are added up: that costs one small allreduce, whatever the world's size. Only where the sums
show that not all ranks say the same are the claims themselves exchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.claims import JOIN, MODULUS, Claim, agree

if TYPE_CHECKING:
    from collections.abc import Generator

    from mpi4py import MPI


class MpiAgreement:
    """See :meth:`reach`; the buffers are used again by every operation, as there is one at a time.

    Args:
        comm: over all ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._rank, self._world_size = comm.Get_rank(), comm.Get_size()
        self._mine = np.zeros(3, np.uint64)
        self._sums = np.zeros(3, np.uint64)
        self.claims: list[Claim] = []

    def reach(self, claim: Claim, number: int) -> Generator[MPI.Request, None, Claim]:
        """The steps to what all ranks that have not joined will do; the own claim if all have joined.

        Each step is a request to be completed before the next is taken. After the last one ``claims`` has what each
        rank said, where the ranks did not say the same.

        Raises:
            MismatchError: on every rank, if they disagree.
        """
        if self._world_size == 1:
            self.claims = [claim]
            return claim
        self._mine[:] = claim.digest, claim.balance(self._rank), claim.kind == JOIN
        yield self._comm.Iallreduce(self._mine, self._sums)
        # Equal digests add up to a multiple; others do so once in 2**64 mismatches.
        if self._sums.tolist() == [claim.digest * self._world_size % MODULUS, 0, 0]:
            return claim
        self.claims = yield from self._exchange(claim)
        return agree(self.claims, number)

    def _exchange(self, claim: Claim) -> Generator[MPI.Request, None, list[Claim]]:
        mine = np.frombuffer(claim.to_bytes(), np.uint8)
        lengths = np.empty(self._world_size, np.int64)
        yield self._comm.Iallgather(np.array([mine.size]), lengths)
        joined = np.empty(lengths.sum(), np.uint8)
        yield self._comm.Iallgatherv(mine, [joined, lengths.tolist()])
        ends = np.cumsum(lengths)
        parts = zip(ends - lengths, ends, strict=True)
        return [Claim.from_bytes(joined[start:end].tobytes()) for start, end in parts]
