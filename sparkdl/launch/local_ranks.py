"""Starts a program once for each rank on this machine, without Spark, and ends all of them together.

Runs where it is called: the coordinator lives here. The ranks find each other by their environment variables (see
:mod:`sparkdl.collective.job`), which no other user can read: ours, and those of ``torchrun`` for programs that know no
others.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType

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
from sparkdl.collective.job import FAILURE_KEY, Job
from sparkdl.errors import LaunchError, ParamError
from sparkdl.launch.arrow_memory import ARROW_VARIABLES
from sparkdl.launch.guarded_process import GuardedProcess, how_it_ended
from sparkdl.launch.output_relay import OutputRelay
from sparkdl.topology import Topology, name_ranks

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0

_LOOPBACK = "lo"
"""What Linux calls the interface."""

_ABORT_GRACE_S = 3.0
"""How long the other ranks may take to notice that one failed, and say where they were, before they are ended."""

_END_GRACE_S = 3.0
"""How long ranks may take after a polite request."""

_LAST_LINES_S = 3.0
"""How long the last lines of all ranks may take when these have ended."""

OnLine = Callable[[int, int, bytes], None]
"""Called with a rank, 1 for its standard output or 2 for standard error, and one line with its end."""


@dataclass(frozen=True, kw_only=True)
class FailedRank:
    """The rank that ended the job.

    Attributes:
        rank: its number.
        status: its exit status, as of :class:`subprocess.Popen`.
        reason: the error that it ended with, where it could tell; else how its process ended.
    """

    rank: int
    status: int
    reason: str


class LocalRanks:
    """The ranks of one job, as processes of this machine. A context manager: none of them outlives it, or this process.

    Args:
        command: the program that each rank runs, and its arguments.
        num_ranks: how many.
        transport: of the communicator that they find; ``"mpi"`` and ``"hierarchical-mpi"`` put them into one MPI world,
            too.
        wire: how that sends sums and averages of float32 by TCP.
        timeout_s: seconds for opening it, and the default deadline of its operations.
        environment: what the ranks' environment begins with.
        on_line: gets what they print, from a thread for each rank and stream.

    Raises:
        ParamError: if there is to be no rank, or no communicator can be opened with these choices.
        LaunchError: when entered, if there is no such program.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_ranks: int,
        transport: str = "auto",
        wire: str = "float32",
        timeout_s: float = 300.0,
        environment: Mapping[str, str] = os.environ,
        on_line: OnLine,
    ) -> None:
        if num_ranks < 1:
            raise ParamError(f"{num_ranks} ranks are too few; start 1 or more")
        check_transport(transport, wire)
        check_timeout(timeout_s)
        self._command = list(command)
        self._num_ranks = num_ranks
        self._transport, self._wire, self._timeout_s = transport, wire, timeout_s
        self._environment = environment
        self._on_line = on_line
        self._processes: list[GuardedProcess] = []
        self._relays: list[tuple[int, OutputRelay]] = []
        self._pmi_servers: list[PmiServer] = []
        self._news: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
        self._stack = ExitStack()

    def __enter__(self) -> LocalRanks:
        with ExitStack() as stack:
            secret = new_secret()
            self._coordinator = stack.enter_context(
                Coordinator(secret=secret, world_size=self._num_ranks, host="127.0.0.1")
            )
            self._client = stack.enter_context(
                RendezvousClient.connect(self._coordinator.address, secret, _CONNECT_TIMEOUT_S)
            )
            stack.callback(self._end, is_patient=False)
            for rank in range(self._num_ranks):
                job = Job(
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def wait(self) -> FailedRank | None:
        """Wait until all ranks have ended well, and return None; or until one failed, and end the others.

        Raises:
            OSError: what ``on_line`` raised; the ranks are ended when the context is left.
        """
        for _ in range(self._num_ranks):
            rank = self._take_news()
            if self._processes[rank].status != 0:
                deadline = Deadline(_ABORT_GRACE_S)
                for process in self._processes:
                    process.exited.wait(deadline.remaining_s())
                self._end(is_patient=True)
                return self._blame(rank)
        self._end(is_patient=True)  # what they have left running
        return None

    def have_met(self) -> bool:
        """Whether any rank has opened the communicator, begun to initialize torch.distributed, or initialized MPI.

        Without it ranks can only know of each other by means of their own, as a ``TCPStore`` that they made.
        """
        # One of the connections is ours.
        return self._coordinator.num_admitted > 1 or any(server.has_begun for server in self._pmi_servers)

    def _start(self, job: Job, stack: ExitStack) -> None:
        variables = {
            # A share of the cores each; what the user has set is the user's choice.
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // self._num_ranks)),
            **ARROW_VARIABLES,
            # Gloo would listen on the interface of the host's name, which need not have one.
            "GLOO_SOCKET_IFNAME": _LOOPBACK,
            **self._environment,
            # A line is passed on when it is printed, not when a buffer is full.
            "PYTHONUNBUFFERED": "1",
            **job.to_variables(),
            **job.to_torchrun_variables(Topology(rank=job.rank, host_of_rank=(0,) * job.world_size)),
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
                    separate_errors=True,
                    on_exit=partial(self._news.put, job.rank),
                )
            except OSError as error:
                raise LaunchError(f"{self._command[0]} cannot be started: {error.strerror}") from error
        self._processes.append(process)
        for stream, output in enumerate(process.outputs, start=1):
            relay = OutputRelay(
                output,
                on_line=partial(self._on_line, job.rank, stream),
                on_error=self._news.put,
                name=f"sparkdl-rank-{job.rank}",
            )
            self._relays.append((job.rank, relay))

    def _serve_pmi(self, job: Job, stack: ExitStack, inherited: ExitStack) -> int:
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

    def _take_news(self) -> int:
        news = self._news.get()
        if isinstance(news, OSError):
            raise news
        return news

    def _blame(self, first: int) -> FailedRank:
        """The rank that failed by itself, which need not be the first that has ended."""
        if self._client.check([FAILURE_KEY]):
            told = json.loads(self._client.get(FAILURE_KEY, _CONNECT_TIMEOUT_S))
            status = self._processes[told["rank"]].status
            if status is None:  # not even SIGKILL has ended it yet
                status = -signal.SIGKILL
            if status:
                return FailedRank(rank=told["rank"], status=status, reason=f"failed: {told['error']}")
        status = self._processes[first].status
        assert status is not None, "the news was that it has ended"
        return FailedRank(rank=first, status=status, reason=how_it_ended(status))

    def _end(self, *, is_patient: bool) -> None:
        if self._processes:
            with ThreadPoolExecutor(max_workers=len(self._processes)) as pool:
                list(pool.map(lambda process: process.end(grace_s=_END_GRACE_S), self._processes))
            stuck = [rank for rank, process in enumerate(self._processes) if not process.exited.is_set()]
            if stuck:
                logger.warning(
                    "%s could not be ended: what runs there waits in the kernel for a disk, a network or a GPU that "
                    "does not answer, and still holds memory.",
                    name_ranks(stuck),
                )
        deadline, relays, self._relays = Deadline(_LAST_LINES_S), self._relays, []
        finished = [(rank, relay.finish(deadline, is_patient=is_patient)) for rank, relay in relays]
        held = sorted({rank for rank, is_finished in finished if not is_finished})
        if held:
            logger.warning(
                "What %s left running, in a session of its own, still holds its output open; no more of it is shown.",
                name_ranks(held),
            )
