"""Runs a program on ranks that are processes of this machine, without Spark: what ``sparkdl run`` does.

The ranks find each other through environment variables, which other users cannot read: the variables of
:mod:`sparkdl.collective.job`, and the variables of ``torchrun`` for programs that read only the latter. The calling
process runs the coordinator, and ends all ranks together.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from sparkdl.collective import (
    Coordinator,
    Deadline,
    PmiServer,
    RendezvousClient,
    check_timeout,
    check_transport,
    new_secret,
    pmi_environment,
    uses_mpi,
)
from sparkdl.collective.job import FAILURE_KEY, RankJob
from sparkdl.collective.torchrun_variables import torchrun_variables
from sparkdl.cores import THREADS, check_threads, thread_variables, threads_of_local_rank
from sparkdl.errors import LaunchError, ParamError
from sparkdl.launch.forkserver.guard import GuardedProcess, describe_exit
from sparkdl.launch.local_launch import check_loopback
from sparkdl.launch.rank.environment import ARROW_VARIABLES
from sparkdl.launch.task.supervisor import OutputRelay
from sparkdl.rendezvous.addresses import LOOPBACK
from sparkdl.topology import Topology, name_ranks

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0

_LOOPBACK = "lo"
"""Name of the loopback interface in Linux."""

_ABORT_GRACE_S = 3.0
"""How long the other ranks may take, after one has failed, to notice it and raise an error, before they are ended."""

_END_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""

_LAST_LINES_S = 3.0
"""How long to wait for the last lines of all ranks once these have ended."""

OnLine = Callable[[int, int, bytes], None]
"""Called with the rank, the stream (1: standard output, 2: standard error) and one line with its line end."""


@dataclass(frozen=True, kw_only=True)
class FailedRank:
    """The rank that ended the job.

    Attributes:
        rank: number of the rank.
        status: exit status of its process, as :class:`subprocess.Popen` reports it.
        reason: the error of the rank, if it could report one; otherwise how its process ended.
    """

    rank: int
    status: int
    reason: str


class LocalRanks:
    """The ranks of one job, as processes of this machine; a context manager that ends them.

    The processes also end if this process dies.

    Args:
        command: the program that each rank runs, and its arguments.
        num_ranks: number of ranks.
        transport: transport of the communicator; with ``"mpi"`` and ``"hierarchical-mpi"`` the ranks also form an MPI
            world.
        wire: data type in which the communicator sends sums and averages of float32 over TCP.
        timeout_s: seconds for opening the communicator, and the default deadline of its operations.
        threads_per_rank: number of threads of each rank; by default as for :func:`~sparkdl.launch.run_on_local_ranks`.
        on_line: called with each line that the ranks print, from one thread per rank and stream.

    Raises:
        ParamError: if ``num_ranks`` is less than 1, or no communicator can be opened with these choices.
        LaunchError: when the context is entered, if the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_ranks: int,
        transport: str = "auto",
        wire: str = "float32",
        timeout_s: float = 300.0,
        threads_per_rank: int | None = None,
        on_line: OnLine,
    ) -> None:
        if num_ranks < 1:
            raise ParamError(f"{num_ranks} ranks are too few; start 1 or more")
        check_threads(threads_per_rank)
        check_transport(transport, wire)
        check_timeout(timeout_s)
        self._command = list(command)
        self._num_ranks = num_ranks
        self._num_threads = threads_per_rank or threads_of_local_rank(num_ranks)
        self._transport, self._wire, self._timeout_s = transport, wire, timeout_s
        self._on_line = on_line
        self._processes: list[GuardedProcess] = []
        self._relays: list[tuple[int, OutputRelay]] = []
        self._pmi_servers: list[PmiServer] = []
        self._ended: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
        self._stack = ExitStack()

    def __enter__(self) -> LocalRanks:
        with ExitStack() as stack:
            secret = new_secret()
            check_loopback()
            self._coordinator = stack.enter_context(
                Coordinator(secret=secret, world_size=self._num_ranks, host=LOOPBACK)
            )
            self._client = RendezvousClient.connect(self._coordinator.address, secret, _CONNECT_TIMEOUT_S)
            stack.enter_context(self._client)
            stack.callback(self._end, is_patient=False)
            for rank in range(self._num_ranks):
                job = RankJob(
                    rank=rank,
                    world_size=self._num_ranks,
                    coordinator=self._coordinator.address,
                    secret=secret,
                    transport=self._transport,
                    wire=self._wire,
                    timeout_s=self._timeout_s,
                )
                self._start(job, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait(self) -> FailedRank | None:
        """Wait until all ranks have ended with status 0, or until one has failed; then end the others.

        Returns:
            The failed rank; None if all ranks have ended with status 0.

        Raises:
            OSError: if ``on_line`` raised it; the ranks are ended when the context is left.
        """
        for _ in range(self._num_ranks):
            rank = self._ended.get()
            if isinstance(rank, OSError):
                raise rank
            if self._processes[rank].status != 0:
                deadline = Deadline(_ABORT_GRACE_S)
                for process in self._processes:
                    process.exited.wait(deadline.remaining_s())
                self._end(is_patient=True)
                return self._blame(rank)
        self._end(is_patient=True)  # ends processes that the ranks have left running
        return None

    def have_met(self) -> bool:
        """Whether any rank has opened the communicator, begun to initialize torch.distributed, or initialized MPI.

        Otherwise the ranks have worked independently, unless they have connected by other means, such as a ``TCPStore``
        of their own.
        """
        # One of the connections is this launcher's own.
        return self._coordinator.num_admitted > 1 or any(server.has_begun for server in self._pmi_servers)

    def _start(self, job: RankJob, stack: ExitStack) -> None:
        variables = {
            **thread_variables(self._num_threads),
            **ARROW_VARIABLES,
            # By default Gloo listens on the interface of the address to which the host name resolves; there may be
            # none.
            "GLOO_SOCKET_IFNAME": _LOOPBACK,
            **os.environ,
            THREADS: str(self._num_threads),
            # Output is passed on line by line, not when a buffer is full.
            "PYTHONUNBUFFERED": "1",
            **job.to_variables(),
            **torchrun_variables(job, Topology(rank=job.rank, host_of_rank=(0,) * job.world_size)),
        }
        with ExitStack() as inherited:
            fds: list[int] = []
            if uses_mpi(self._transport):
                fds.append(self._serve_pmi(job, stack, inherited))
                variables |= pmi_environment(fds[0], job.rank, job.world_size)
            try:
                process = GuardedProcess(
                    self._command,
                    environment=variables,
                    pass_fds=fds,
                    on_exit=partial(self._ended.put, job.rank),
                )
            except OSError as error:
                raise LaunchError(f"{self._command[0]} cannot be started: {error.strerror}") from error
        self._processes.append(process)
        for stream, output in enumerate(process.outputs, start=1):
            relay = OutputRelay(
                output,
                on_line=partial(self._on_line, job.rank, stream),
                on_error=self._ended.put,
                name=f"sparkdl-rank-{job.rank}",
            )
            self._relays.append((job.rank, relay))

    def _serve_pmi(self, job: RankJob, stack: ExitStack, inherited: ExitStack) -> int:
        ours, theirs = socket.socketpair()
        inherited.enter_context(theirs)
        server = PmiServer(
            ours,
            self._client.prefix("mpi"),
            job.rank,
            job.world_size,
            host_of_rank=[0] * job.world_size,
            timeout_s=self._timeout_s,
        )
        stack.enter_context(server)
        self._pmi_servers.append(server)
        return theirs.fileno()

    def _blame(self, first: int) -> FailedRank:
        """Find the rank that failed by itself; it need not be the first one that ended."""
        if self._client.check([FAILURE_KEY]):
            failure = json.loads(self._client.get(FAILURE_KEY, _CONNECT_TIMEOUT_S))
            status = self._processes[failure["rank"]].status
            if status is None:  # SIGKILL has not ended it yet
                status = -signal.SIGKILL
            if status:
                return FailedRank(rank=failure["rank"], status=status, reason=f"failed: {failure['error']}")
        status = self._processes[first].status
        assert status is not None, "its end was reported"
        return FailedRank(rank=first, status=status, reason=describe_exit(status))

    def _end(self, *, is_patient: bool) -> None:
        if self._processes:
            with ThreadPoolExecutor(max_workers=len(self._processes)) as pool:
                list(pool.map(lambda process: process.end(grace_s=_END_GRACE_S), self._processes))
            stuck = [rank for rank, process in enumerate(self._processes) if not process.exited.is_set()]
            if stuck:
                logger.warning(
                    "%s could not be ended: the processes wait in the kernel for a disk, a network or a GPU that does "
                    "not answer, and still hold memory.",
                    name_ranks(stuck),
                )
        deadline, relays, self._relays = Deadline(_LAST_LINES_S), self._relays, []
        finished = [(rank, relay.finish(deadline, is_patient=is_patient)) for rank, relay in relays]
        held = sorted({rank for rank, is_finished in finished if not is_finished})
        if held:
            logger.warning(
                "A process started by %s still holds the output of the rank open; further output is not shown.",
                name_ranks(held),
            )
