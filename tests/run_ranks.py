"""Starts real rank processes on this machine, without Spark, and collects their return values.

``run_ranks(2, fn, 7)`` calls ``fn(environment, 7)`` in two new processes; ``fn`` is a function at the top of a module.
A coordinator runs in the calling process. No rank process outlives the call in any case.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.collective import (
    Address,
    Communicator,
    Coordinator,
    Deadline,
    PmiServer,
    RendezvousClient,
    StallCheck,
    all_gather_bytes,
    new_secret,
    open_communicator,
    pmi_environment,
    set_current_communicator,
    uses_mpi,
)
from sparkdl.errors import RankError
from sparkdl.rendezvous.addresses import LOOPBACK
from tests.forkserver import ForkedRank, Forkserver, forkservers_for
from tests.pickled_call import pickle_call

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

_PR_SET_PDEATHSIG = 1
_LEAVE_TIMEOUT_S = 60.0
_HANG_TIMEOUT_S = 500.0


@dataclass(kw_only=True)
class RankEnvironment:
    """What a rank function needs to find the other ranks.

    Attributes:
        transport: default transport of :meth:`open` and :meth:`communicator`.
        process_variables: environment variables of the rank.
    """

    rank: int
    world_size: int
    address: Address
    secret: bytes = field(repr=False)
    transport: str
    process_variables: dict[str, str]
    timeout_s: float
    _rendezvous: RendezvousClient | None = None

    @property
    def rendezvous(self) -> RendezvousClient:
        """The connection of this process to the coordinator, made at first use."""
        if self._rendezvous is None:
            self._rendezvous = RendezvousClient.connect(self.address, self.secret, self.timeout_s)
        return self._rendezvous

    def open(
        self,
        *,
        transport: str | None = None,
        timeout_s: float = 20.0,
        name: str = "world",
        host_of_rank: Sequence[int] | None = None,
        wire: str = "float32",
        stall_check: StallCheck | None = None,
    ) -> Communicator:
        """Open a communicator of all ranks; the caller closes it."""
        return open_communicator(
            rendezvous=self.rendezvous,
            rank=self.rank,
            world_size=self.world_size,
            secret=self.secret,
            transport=transport or self.transport,
            timeout_s=timeout_s,
            name=name,
            host_of_rank=host_of_rank,
            wire=wire,
            stall_check=stall_check,
        )

    @contextmanager
    def communicator(
        self, *, transport: str | None = None, timeout_s: float = 20.0
    ) -> Iterator[Communicator]:
        """Open a communicator of all ranks and make it the current one of the process while the block runs."""
        with self.open(transport=transport, timeout_s=timeout_s) as communicator:
            set_current_communicator(communicator)
            try:
                yield communicator
            finally:
                set_current_communicator(None)

    def meet(self, key: str) -> None:
        """Wait for all ranks without a communicator; each meeting has its own key."""
        all_gather_bytes(
            self.rendezvous,
            key=key,
            rank=self.rank,
            world_size=self.world_size,
            value=b"",
            timeout_s=60.0,
        )

    def close(self) -> None:
        """Disconnect from the coordinator."""
        if self._rendezvous is not None:
            self._rendezvous.close()


class Place(Protocol):
    """Where ranks run if not in this network namespace; ``tests.hosts`` has one with several hosts."""

    def command(self, rank: int) -> list[str]:
        """The prefix of a rank's command line."""

    def inside(self) -> AbstractContextManager[None]:
        """A context in which a new coordinator listens where all ranks reach it."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    transport: str = "auto",
    mpi: bool = False,
    timeout_s: float = _HANG_TIMEOUT_S,
    may_die: Collection[int] = (),
    variables: dict[str, str] | None = None,
    place: Place | None = None,
) -> list[Any]:
    """Call ``fn(environment, *args)`` on every rank, each in its own process, and return the results by rank.

    Args:
        world_size: number of ranks to start.
        fn: function at the top of a module; it and its arguments are pickled.
        args: further arguments, the same for all ranks.
        transport: default transport of the ranks' communicators.
        mpi: whether the ranks form one MPI world.
        timeout_s: time in seconds after which all ranks are killed; by default longer than any rank takes that does
            not hang, also on a busy machine.
        may_die: ranks that may be killed; their result is None.
        variables: environment variables for all ranks.
        place: where the ranks run; directly on this machine when None.

    Raises:
        RankError: if ``fn`` raised on a rank or a rank died; the message has that rank's traceback.
        TimeoutError: if some ranks did not return in time; the message names them.
    """
    call, modules = pickle_call(fn, args)
    inherited_variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(variables or {})}
    forkservers = forkservers_for(world_size, inherited_variables, modules)
    with ExitStack() as stack:
        secret = new_secret()
        with place.inside() if place else nullcontext():
            host = None if place else LOOPBACK
            coordinator = stack.enter_context(Coordinator(secret=secret, world_size=world_size, host=host))
        connections = {}
        for rank in range(world_size):
            environment = RankEnvironment(
                rank=rank,
                world_size=world_size,
                address=coordinator.address,
                secret=secret,
                transport=transport,
                process_variables=dict(variables or {}),
                timeout_s=timeout_s,
            )
            inherited = stack.enter_context(_mpi_end(environment)) if mpi or uses_mpi(transport) else None
            prefix = place.command(rank) if place else []
            connection = stack.enter_context(
                _start(prefix, environment, inherited, forkservers[rank], rank in may_die)
            )
            connection.send_bytes(pickle.dumps((environment, call)))
            connections[rank] = connection
        return _collect(connections, Deadline(timeout_s), may_die)


def _collect(connections: dict[int, Connection], deadline: Deadline, may_die: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = {connections[rank]: rank for rank in connections if rank not in results}
        ready = wait(list(waiting), deadline.remaining_s())
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(waiting.values())} did not return within {deadline.timeout_s:g} s"
            )
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            try:
                result, failure = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                result, failure = None, None if rank in may_die else f"rank {rank} died"
            if failure is not None:
                raise RankError(
                    f"rank {rank}:\n{failure}", rank=rank, host="localhost", traceback_text=failure
                )
            results[rank] = result
    return [results[rank] for rank in sorted(results)]


@contextmanager
def _start(
    prefix: list[str],
    environment: RankEnvironment,
    inherited: socket.socket | None,
    forkserver: Forkserver,
    may_die: bool,
) -> Iterator[Connection]:
    ours, theirs = socket.socketpair()
    fds = [theirs.fileno()] + ([inherited.fileno()] if inherited is not None else [])
    process = _start_process(prefix, environment, fds, forkserver)
    theirs.close()
    if inherited is not None:
        inherited.close()
    connection = Connection(ours.detach())
    try:
        yield connection
        # A rank that has sent its result has to end on its own; its clean exit is part of the test.
        code = process.wait(timeout=_LEAVE_TIMEOUT_S)
        if code != 0 and not may_die:
            rank = environment.rank
            raise RankError(f"rank {rank} ended with exit code {code}", rank=rank, host="localhost")
    finally:
        connection.close()
        process.kill()
        process.wait()


def _start_process(
    prefix: list[str], environment: RankEnvironment, fds: list[int], forkserver: Forkserver
) -> subprocess.Popen[bytes] | ForkedRank:
    if not prefix:
        return forkserver.fork({**os.environ, **environment.process_variables}, fds)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.run_ranks", str(fds[0])],
        pass_fds=fds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment.process_variables},
    )


@contextmanager
def _mpi_end(environment: RankEnvironment) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with RendezvousClient.connect(
        environment.address, environment.secret, environment.timeout_s
    ) as rendezvous:
        server = PmiServer(
            ours,
            rendezvous,
            environment.rank,
            environment.world_size,
            host_of_rank=[0] * environment.world_size,
            timeout_s=environment.timeout_s,
        )
        variables = pmi_environment(theirs.fileno(), environment.rank, environment.world_size)
        environment.process_variables.update(variables)
        with server:
            yield theirs


def rank_main(fd: int) -> None:
    """Call the function received over the connection, and send back its return value."""
    # If the test process is killed, its ranks end with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(fd)
    environment, call = pickle.loads(connection.recv_bytes())
    try:
        fn, args = pickle.loads(call)
        result, failure = fn(environment, *args), None
    except BaseException:
        result, failure = None, traceback.format_exc()
    environment.close()
    connection.send_bytes(pickle.dumps((result, failure)))
    connection.close()


if __name__ == "__main__":
    rank_main(int(sys.argv[1]))
