"""Communicators over MPI. Runs on ranks.

The ranks must already stand in one MPI world: started by ``mpiexec``, or by sparkdl through PMI (see
``pmi``). Operations are non-blocking ones that are polled, so that each has a deadline and a death or an
abort ends it at once. What MPI cannot do: after a rank is lost no communicator of that MPI world is of
further use, so the processes have to be started again; and the ports that an MPI library opens between hosts
are not authenticated.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.communicator import Array, Communicator
from sparkdl.collective.deadline import Deadline
from sparkdl.collective.flat_buffers import flatten
from sparkdl.collective.mpi_library import check_places, load_mpi, unfinished
from sparkdl.collective.peer_watch import PeerWatch
from sparkdl.collective.reductions import OPS, narrow_into, widen
from sparkdl.collective.rendezvous import all_gather_bytes
from sparkdl.collective.turns import Turns
from sparkdl.errors import (
    CommunicatorError,
    CommunicatorTimeoutError,
    ParamError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from sparkdl.collective.handle import Handle
    from sparkdl.collective.opening import Opening
    from sparkdl.topology import Topology

    Begin = Callable[[], tuple[MPI.Request, Callable[[], None]]]
    """Starts an operation; returns its request and what to do once that is complete."""

_SPIN_S = 0.05
_NAP_S = 2e-4
_NUM_TAGS = 32768
"""How many tags every MPI library allows at least."""


class MpiCommunicator(Communicator):
    """See :class:`~sparkdl.collective.communicator.Communicator`; made by :func:`open_mpi_communicator`."""

    def __init__(self, comm: MPI.Intracomm, opening: Opening, topology: Topology) -> None:
        super().__init__(opening, topology)
        self._comm = comm
        self._mpi = load_mpi()
        self._num_joined = 0
        self._failure: CommunicatorError | None = None
        self._closed = False
        self._abandoned: list[object] = []
        # From here on the MPI world is finalized only after this communicator was closed as it should.
        unfinished.add(self)
        self._watch = PeerWatch(
            opening.own_rendezvous,
            rank=self.rank,
            world_size=self.world_size,
            position=lambda: self._num_joined,
        )
        self._turns = Turns(f"sparkdl-mpi-{opening.name}")

    @property
    def transport(self) -> str:
        """``"mpi"``."""
        return "mpi"

    @property
    def failure(self) -> str | None:
        """See the contract."""
        failure = self._failure or self._watch.failure
        return str(failure) if failure else None

    def allreduce(self, array: Array, *, op: str = "sum", timeout_s: float | None = None) -> None:
        """See the contract."""
        self._turns.run(self._operation("allreduce", self._begin_allreduce(array, op), timeout_s))

    def allreduce_async(self, array: Array, *, op: str = "sum", timeout_s: float | None = None) -> Handle:
        """See the contract."""
        return self._turns.submit(self._operation("allreduce", self._begin_allreduce(array, op), timeout_s))

    def reduce_scatter(
        self, array: Array, out: Array, *, op: str = "sum", timeout_s: float | None = None
    ) -> None:
        """See the contract."""
        begin = self._begin_reduce_scatter(array, out, op)
        self._turns.run(self._operation("reduce_scatter", begin, timeout_s))

    def reduce_scatter_async(
        self, array: Array, out: Array, *, op: str = "sum", timeout_s: float | None = None
    ) -> Handle:
        """See the contract."""
        begin = self._begin_reduce_scatter(array, out, op)
        return self._turns.submit(self._operation("reduce_scatter", begin, timeout_s))

    def allgather(self, array: Array, out: Array, *, timeout_s: float | None = None) -> None:
        """See the contract."""
        self._turns.run(self._operation("allgather", self._begin_allgather(array, out), timeout_s))

    def allgather_async(self, array: Array, out: Array, *, timeout_s: float | None = None) -> Handle:
        """See the contract."""
        return self._turns.submit(self._operation("allgather", self._begin_allgather(array, out), timeout_s))

    def broadcast(self, array: Array, *, root: int, timeout_s: float | None = None) -> None:
        """See the contract."""
        self._turns.run(self._operation("broadcast", self._begin_broadcast(array, root), timeout_s))

    def broadcast_async(self, array: Array, *, root: int, timeout_s: float | None = None) -> Handle:
        """See the contract."""
        return self._turns.submit(self._operation("broadcast", self._begin_broadcast(array, root), timeout_s))

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """See the contract."""
        self._turns.run(self._operation("barrier", self._begin_barrier, timeout_s))

    def barrier_async(self, *, timeout_s: float | None = None) -> Handle:
        """See the contract."""
        return self._turns.submit(self._operation("barrier", self._begin_barrier, timeout_s))

    def abort(self, reason: str) -> None:
        """See the contract."""
        if not self._closed and self.failure is None:
            self._watch.abort(reason)

    def close(self) -> None:
        """See the contract."""
        if self._closed:
            return
        self._turns.close()
        self._closed = True
        self._watch.leave()
        if self.failure is None:
            self._comm.Free()
            unfinished.discard(self)

    def _operation(self, what: str, begin: Begin, timeout_s: float | None) -> Callable[[], None]:
        return partial(self._carry_out, what, begin, self.timeout_s if timeout_s is None else timeout_s)

    def _carry_out(self, what: str, begin: Begin, timeout_s: float) -> None:
        if self._closed:
            raise CommunicatorError(f"{what}: communicator {self.name!r} is closed")
        self._check(what)
        deadline = Deadline(timeout_s)
        self._num_joined += 1
        try:
            request, finish = begin()
            # MPI may still write to the buffers of an operation that we give up: keep them.
            self._abandoned.append((request, finish))
            self._complete(what, request, deadline)
        except self._mpi.Exception as error:
            self._failure = CommunicatorError(f"{what} on {self.name!r} failed in MPI: {error}")
            raise self._failure from error
        self._abandoned.pop()
        finish()

    def _complete(self, what: str, request: MPI.Request, deadline: Deadline) -> None:
        spin = deadline.at_most(_SPIN_S)
        while not request.Test():
            self._check(what)
            if deadline.expired:
                missing = self._watch.roll_call()
                self._check(what)
                who = f"ranks {missing} had not joined" if missing else "all ranks had joined"
                self._failure = CommunicatorTimeoutError(
                    f"{what} on {self.name!r} was not complete within {deadline.timeout_s:g} s: {who}"
                )
                raise self._failure
            if spin.expired:
                time.sleep(_NAP_S)
            else:
                os.sched_yield()

    def _check(self, what: str) -> None:
        failure = self._failure or self._watch.failure
        if failure is not None:
            raise type(failure)(f"{what} on {self.name!r}: {failure}") from failure

    def _begin_allreduce(self, array: Array, op: str) -> Begin:
        buffer = flatten(array)
        mpi_op = self._find_op(op)

        def begin() -> tuple[MPI.Request, Callable[[], None]]:
            working = widen(buffer.data, buffer.dtype, op)
            request = self._comm.Iallreduce(self._mpi.IN_PLACE, working, mpi_op)
            return request, lambda: narrow_into(buffer.data, working, buffer.dtype, op, self.world_size)

        return begin

    def _begin_reduce_scatter(self, array: Array, out: Array, op: str) -> Begin:
        source, target = flatten(array), flatten(out)
        self._check_blocks(whole=(source.dtype, source.data.size), block=(target.dtype, target.data.size))
        mpi_op = self._find_op(op)

        def begin() -> tuple[MPI.Request, Callable[[], None]]:
            working = widen(source.data, source.dtype, op)
            reduced = target.data if working is source.data else np.empty(target.data.size, working.dtype)
            request = self._comm.Ireduce_scatter_block(working, reduced, mpi_op)
            return request, lambda: narrow_into(target.data, reduced, target.dtype, op, self.world_size)

        return begin

    def _begin_allgather(self, array: Array, out: Array) -> Begin:
        source, target = flatten(array), flatten(out)
        self._check_blocks(whole=(target.dtype, target.data.size), block=(source.dtype, source.data.size))
        num_bytes = source.data.nbytes
        target_bytes = target.data.view(np.uint8)
        own_bytes = target_bytes[self.rank * num_bytes : (self.rank + 1) * num_bytes]

        def begin() -> tuple[MPI.Request, Callable[[], None]]:
            if num_bytes and own_bytes.ctypes.data != source.data.ctypes.data:
                own_bytes[:] = source.data.view(np.uint8)
            request = self._comm.Iallgather(self._mpi.IN_PLACE, target_bytes)
            return request, lambda: _keep(source, target)

        return begin

    def _begin_broadcast(self, array: Array, root: int) -> Begin:
        buffer = flatten(array)
        if not 0 <= root < self.world_size:
            raise ParamError(f"root {root} is outside a world of {self.world_size} ranks")

        def begin() -> tuple[MPI.Request, Callable[[], None]]:
            request = self._comm.Ibcast(buffer.data.view(np.uint8), root)
            return request, lambda: _keep(buffer)

        return begin

    def _begin_barrier(self) -> tuple[MPI.Request, Callable[[], None]]:
        return self._comm.Ibarrier(), _keep

    def _check_blocks(self, *, whole: tuple[str, int], block: tuple[str, int]) -> None:
        if whole != (block[0], block[1] * self.world_size):
            raise ParamError(
                f"{whole[1]} elements of {whole[0]} are not {self.world_size} blocks"
                f" of {block[1]} elements of {block[0]}"
            )

    def _find_op(self, op: str) -> MPI.Op:
        if op not in OPS:
            raise ParamError(f"op={op!r} is unknown; it may be one of {', '.join(OPS)}")
        mpi = self._mpi
        # An average is a sum that is divided afterwards.
        ops: dict[str, MPI.Op] = {"sum": mpi.SUM, "avg": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}
        product: MPI.Op = mpi.PROD
        return ops.get(op, product)


def open_mpi_communicator(opening: Opening) -> MpiCommunicator:
    """Open a communicator over MPI; see :func:`~sparkdl.collective.communicator.open_communicator`.

    The ranks' numbers in the MPI world may be others, and that world may have more ranks.

    Raises:
        TransportUnavailableError: if mpi4py or an MPI library is missing.
        CommunicatorError: if the ranks do not stand in one MPI world.
        CommunicatorTimeoutError: if some rank does not take part in time.
    """
    deadline = Deadline(opening.timeout_s)
    world = load_mpi().COMM_WORLD
    places = all_gather_bytes(
        opening.own_rendezvous,
        key="mpi/places",
        rank=opening.rank,
        world_size=opening.world_size,
        value=json.dumps([world.Get_rank(), world.Get_size()]).encode(),
        timeout_s=deadline.remaining_s(),
    )
    members = check_places([(place[0], place[1]) for place in map(json.loads, places)])
    topology = opening.find_topology(deadline)
    comm = _create_group(world, members, opening.name, deadline)
    comm.Set_errhandler(load_mpi().ERRORS_RETURN)
    return MpiCommunicator(comm, opening, topology)


def _create_group(world: MPI.Intracomm, members: list[int], name: str, deadline: Deadline) -> MPI.Intracomm:
    """Make the communicator of some ranks of the MPI world.

    MPI has no form of this that can be polled, so it happens on a thread of its own. Should a rank die
    meanwhile, that thread stays in MPI for as long as the process lives; the caller does not.
    """
    tag = zlib.crc32(name.encode()) % _NUM_TAGS
    created: Future[MPI.Intracomm] = Future()

    def create() -> None:
        try:
            created.set_result(world.Create_group(world.Get_group().Incl(members), tag))
        except BaseException as error:
            created.set_exception(error)

    unfinished.add(created)
    threading.Thread(target=create, name="sparkdl-mpi-create", daemon=True).start()
    try:
        comm = created.result(deadline.remaining_s())
    except FutureTimeoutError:
        raise CommunicatorTimeoutError(
            f"MPI did not make communicator {name!r} within {deadline.timeout_s:g} s, though all"
            f" {len(members)} ranks had come: one of them has died or hangs. Look at the ranks' last log lines."
        ) from None
    except load_mpi().Exception as error:
        raise CommunicatorError(f"MPI cannot make communicator {name!r}: {error}") from error
    unfinished.discard(created)
    return comm


def _keep(*_buffers: object) -> None:
    """Do nothing; whoever holds a call of this holds the buffers of an operation under way."""
