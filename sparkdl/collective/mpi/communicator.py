"""Communicators over MPI: opening, closing and carrying out operations.

The ranks must already be in one MPI world: started by ``mpiexec``, or by sparkdl through PMI (see
:mod:`sparkdl.rendezvous.pmi`). Operations use non-blocking calls of MPI, which are polled, so that each operation has a
deadline and ends at once when a rank dies or aborts. MPI has two limits: after a rank is lost, no communicator of that
MPI world can be used any more, so the processes have to be started again; and the ports that an MPI library opens
between hosts are not authenticated.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.collective.mpi.library import check_one_world, create_group, load_mpi, unfinished
from sparkdl.collective.mpi.messages import MpiMessages
from sparkdl.collective.mpi.movements import MpiGroups
from sparkdl.collective.mpi.operations import JOIN, MpiAgreement, Signature
from sparkdl.collective.mpi.peers import PeerWatch
from sparkdl.collective.telemetry.stalls import NotedWait, StallTimer
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, MismatchError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.store import all_gather_bytes
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparkdl.collective.mpi.operations import MpiPlan, Steps
    from sparkdl.collective.opening import Opening
    from sparkdl.collective.telemetry.monitor import OperationTiming
    from sparkdl.topology import Topology

_SPIN_S = 0.05
_NAP_S = 2e-4
"""Pause between two polls: MPI's own waits have no deadline and cannot be aborted."""

_NEWS_S = 0.5
"""How long to wait, after an error of MPI, for the notice that a rank has died, as MPI does not name the rank."""


class MpiCommunicator(MpiGroups):
    """A communicator over MPI; created by :func:`open_mpi_communicator`."""

    transport = "mpi"

    def __init__(self, comm: MPI.Intracomm, opening: Opening, topology: Topology) -> None:
        super().__init__(comm, opening, topology)
        self._agreement = MpiAgreement(comm)
        self._num_joined = 0
        self._failure: CommunicatorError | None = None
        self._closed = False
        self._abandoned: list[object] = []
        # From here on, MPI is finalized only after this communicator was closed without failure.
        unfinished.add(self)
        self._watch = PeerWatch(
            opening.own_rendezvous,
            rank=self.rank,
            world_size=self.world_size,
            position=lambda: self._num_joined,
        )
        self._timing: OperationTiming
        """Timing of the running operation."""
        self._messages = MpiMessages(self, comm, check=self._check, fail=self._fail)
        self.monitors = self._operations, self._messages.monitor

    @property
    def failure(self) -> str | None:
        """See the contract."""
        failure = self._failure or self._watch.failure
        return str(failure) if failure else None

    def join(self, *, timeout_s: float | None = None) -> int:
        """See the contract; ``timeout_s`` applies to each operation of the other ranks, and to their joining."""
        last: list[int] = []

        def take_part() -> None:
            signature = Signature(kind=JOIN, joined_at=self._num_joined)
            while not last:
                self._drive(self._take_part(signature, last), signature, timeout_s)

        self._queue.run(take_part)
        return last[0]

    def abort(self, reason: str) -> None:
        """See the contract."""
        if not self._closed and self.failure is None:
            self._watch.abort(reason)

    def close(self) -> None:
        """See the contract."""
        if self._closed:
            return
        self._end_timeline()
        self._queue.close()
        self._messages.close()
        self._closed = True
        self._watch.leave()
        if self.failure is None:
            self._comm.Free()
            unfinished.discard(self)

    def _agree_and_move(self, plan: MpiPlan) -> Steps:
        """Agree with the other ranks, and run the steps of the plan."""
        yield from self._agreement.reach(plan.signature, self._num_joined - 1)
        self._timing.all_here()
        for buffer in plan.buffers:
            buffer.pack()
        yield from plan.steps()
        for buffer in plan.buffers:
            buffer.unpack()

    def _take_part(self, signature: Signature, last: list[int]) -> Steps:
        """Take part in one operation of the others; once all have joined, add the rank that joined last to ``last``."""
        try:
            agreed = yield from self._agreement.reach(signature, self._num_joined - 1)
        except MismatchError:
            return  # raised by the other ranks too; this rank continues to wait for their next operation
        self._timing.all_here()
        if agreed.kind == JOIN:
            signatures = self._agreement.signatures
            last.append(max(range(len(signatures)), key=lambda rank: (signatures[rank].joined_at, rank)))
        elif agreed.kind == "allgather":
            yield from self._gather_zeros(agreed)
        elif agreed.op:
            yield from self._reduce_zeros(agreed)

    def _drive(self, steps: Steps, signature: Signature, timeout_s: float | None) -> None:
        """Run the steps of an operation, each as soon as the one before is complete."""
        if self._closed:
            raise CommunicatorError(f"{signature}: communicator {self.name!r} is closed")
        self._check(signature)
        deadline = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        self._num_joined += 1
        measured = self._operations.operation(
            signature.kind,
            name=signature.name,
            num_bytes=signature.num_bytes(self.world_size),
            dtype=signature.dtype,
            queued_ns=self._queue.queued_ns,
        )
        try:
            with measured as self._timing:
                for request in steps:
                    self._complete(signature, request, deadline)
        except MismatchError:
            raise
        except self._mpi.Exception as error:
            if self._watch.failed.wait(_NEWS_S):
                self._abandoned.append(steps)
                self._check(signature)
            failure = CommunicatorError(f"{signature} on {self.name!r} failed in MPI: {error}")
            self._give_up(steps, failure)
            raise failure from error
        except CommunicatorError as error:
            self._give_up(steps, error)
            raise
        except BaseException as error:
            self._give_up(steps, f"{signature} on {self.name!r} was broken off by {type(error).__name__}")
            raise

    def _give_up(self, steps: Steps, failure: CommunicatorError | str) -> None:
        # MPI may still write to the buffers of an operation that is not complete: keep them.
        self._abandoned.append(steps)
        self._fail(failure if isinstance(failure, CommunicatorError) else CommunicatorError(failure))

    def _fail(self, failure: CommunicatorError) -> None:
        if self.failure is None:
            self._failure = failure
            # MPI would let the others wait for this rank until their own deadlines.
            self._watch.pass_on(failure)

    def _check(self, what: object) -> None:
        failure = self._failure or self._watch.failure
        if failure is not None:
            raise type(failure)(f"{what} on {self.name!r}: {failure}") from failure

    def _complete(self, signature: Signature, request: MPI.Request, deadline: Deadline) -> None:
        if not request.Test():
            with NotedWait(self.name, self.world_ranks, str(signature), deadline.timeout_s):
                self._wait_for(signature, request, deadline)

    def _wait_for(self, signature: Signature, request: MPI.Request, deadline: Deadline) -> None:
        spin = deadline.at_most(_SPIN_S)
        stall, find_missing = StallTimer(), partial(self._who_is_missing, signature)
        while not request.Test():
            self._check(signature)
            if deadline.expired:
                who = self._who_is_missing(signature)
                raise CommunicatorTimeoutError(
                    f"{signature} on {self.name!r} was not complete within {deadline.timeout_s:g} s: {who}"
                )
            try:
                stall.check(self, signature, find_missing)
            except CommunicatorTimeoutError as error:
                self._watch.abort(str(error))
                raise
            if spin.expired:
                time.sleep(_NAP_S)
            else:
                os.sched_yield()

    def _who_is_missing(self, signature: Signature) -> str:
        missing = self._watch.roll_call()
        self._check(signature)
        return f"{name_ranks(missing)} had not joined" if missing else "all ranks had joined"


def open_mpi_communicator(opening: Opening) -> MpiCommunicator:
    """Open a communicator over MPI; see :func:`~sparkdl.collective.opening.open_communicator`.

    The ranks may have other numbers in the MPI world, and that world may have more ranks.

    Raises:
        TransportUnavailableError: if mpi4py or an MPI library is missing.
        CommunicatorError: if the ranks are not in one MPI world.
        CommunicatorTimeoutError: if some rank does not take part in time.
    """
    world = load_mpi().COMM_WORLD
    places = all_gather_bytes(
        opening.own_rendezvous,
        key="mpi/places",
        rank=opening.rank,
        world_size=opening.world_size,
        value=json.dumps([world.Get_rank(), world.Get_size()]).encode(),
        timeout_s=opening.deadline.remaining_s(),
    )
    members = check_one_world([(place[0], place[1]) for place in map(json.loads, places)])
    topology = opening.find_topology()
    return MpiCommunicator(create_group(members, opening.name, opening.deadline), opening, topology)
