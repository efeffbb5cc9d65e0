"""Runs a function or a program on ranks that are processes of this machine, without Spark.

:func:`run_on_local_ranks` runs a function and returns the value of each rank. :class:`LocalRanks` starts a program
once for each rank, and ends all of them together. Both run in the calling process, which replaces the driver and the
barrier tasks, and runs the coordinator.

The ranks of a program find each other through environment variables, which other users cannot read: the variables of
:mod:`sparkdl.collective.job`, and the variables of ``torchrun`` for programs that read only the latter.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

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
from sparkdl.collective.torchrun_variables import torchrun_variables
from sparkdl.cores import THREADS, check_threads, in_threads, thread_variables, threads_of_local_rank
from sparkdl.errors import LaunchError, ParamError
from sparkdl.launch.failures import find_culprit, link_error, rank_error, were_ranks_lost
from sparkdl.launch.forkserver.guard import GuardedProcess, describe_exit
from sparkdl.launch.forkserver.reuse import end_idle_forkservers
from sparkdl.launch.hangs.report import raise_hang
from sparkdl.launch.hangs.watch import HangLimits, HangWatch, hang_limits
from sparkdl.launch.rank.environment import ARROW_VARIABLES, rank_environment
from sparkdl.launch.run import Listener, OnEvent, OnLog
from sparkdl.launch.task.supervisor import OutputRelay, RankSupervisor
from sparkdl.launch.wire.channel import MAX_WAITING_MESSAGES, RankMessage
from sparkdl.launch.wire.messages import pickle_call
from sparkdl.launch.wire.outcome import Failure, HealthReport, StopReason
from sparkdl.rendezvous.addresses import LOOPBACK
from sparkdl.topology import Topology, name_ranks

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0

_POLL_S = 0.5
"""How often the launcher checks whether a rank hangs."""

_GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder with one subfolder per GPU of the machine; it exists if NVIDIA's driver is installed."""

_IDLE_S = 60.0
"""How long forkservers are kept for the next launch, the same time as on a cluster."""


def run_on_local_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    transport: str = "auto",
    wire: str = "float32",
    gpus_per_rank: int = 0,
    threads_per_rank: int | None = None,
    mpi: bool = False,
    environment: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
    operation_timeout_s: float = 300.0,
    hang_timeout_s: float | None = None,
    silence_timeout_s: float | None = None,
    on_log: OnLog | None = None,
    on_event: OnEvent | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(context, *args, **kwargs)`` in one process of this machine per rank, and return all values.

    The arguments have the same meaning as those of :func:`~sparkdl.launch.run_on_ranks`; those that concern Spark
    (``spark``, ``resources``, ``start_timeout_s``, ``on_wait``) do not exist here. Each rank gets the next
    ``gpus_per_rank`` GPUs and, unless ``threads_per_rank`` or ``OMP_NUM_THREADS`` is set, a thread per core of its
    share of the machine, which is less where a container has a quota.

    Raises:
        ParamError: if an argument has a value that cannot work.
        SerializationError: if function or arguments cannot be pickled.
        LaunchError: if the ranks cannot be started.
        RankError: if a rank fails; the error names the first failed rank, and ``__cause__`` is that rank's exception.
        HangError: if a rank hangs; the error names the rank and where it was. The log has the stacks of all ranks.
    """
    if num_ranks < 1:
        raise ParamError(f"The number of ranks must be at least 1, got {num_ranks}.")
    if gpus_per_rank < 0:
        raise ParamError(f"The number of GPUs per rank cannot be negative, got {gpus_per_rank}.")
    check_threads(threads_per_rank)
    check_transport(transport, wire)
    check_timeout(operation_timeout_s, "operation_timeout_s")
    limits = hang_limits(hang_timeout_s, operation_timeout_s, silence_timeout_s)
    payload = pickle_call(function, args, kwargs)
    assignment = {
        "world_size": num_ranks,
        "transport": transport,
        "wire": wire,
        "operation_timeout_s": operation_timeout_s,
    }
    num_threads = threads_per_rank or threads_of_local_rank(num_ranks)
    logger.info("Starting %d ranks on this machine with %s each.", num_ranks, in_threads(num_threads))
    with _LocalWorld(assignment, with_mpi=mpi or uses_mpi(transport)) as world:
        for rank in range(num_ranks):
            gpus = gpus_of(rank, gpus_per_rank, os.environ)
            variables = _variables(environment or {}, gpus, num_threads)
            world.start(rank, payload, variables, () if gpus_per_rank else modules)
        return world.collect(Listener(on_log, on_event), limits)


def _serve_rendezvous(
    secret: bytes, num_ranks: int, stack: ExitStack
) -> tuple[Coordinator, RendezvousClient]:
    """Start the coordinator of local ranks, and connect to it; the stack closes both.

    Raises:
        LaunchError: if the loopback interface does not work.
    """
    try:
        coordinator = stack.enter_context(Coordinator(secret=secret, world_size=num_ranks, host=LOOPBACK))
        client = RendezvousClient.connect(coordinator.address, secret, _CONNECT_TIMEOUT_S)
    except OSError as error:
        raise LaunchError(
            f"Ranks on one machine meet at {LOOPBACK}, and this machine does not reach itself there: {error}. Bring "
            "its loopback interface up, as by `ip link set lo up`."
        ) from error
    return coordinator, stack.enter_context(client)


@dataclass(frozen=True)
class _Ended:
    """Message that a rank has ended; it follows all other messages of the rank."""

    rank: int
    failure: Failure | None


class _LocalWorld:
    """The coordinator, processes and messages of the ranks of one launch; a context manager that ends all of them."""

    def __init__(self, assignment: dict[str, Any], *, with_mpi: bool) -> None:
        self._assignment, self._with_mpi = assignment, with_mpi
        self._num_ranks: int = assignment["world_size"]
        self._ranks: list[RankSupervisor] = []
        self._inbox: queue.Queue[RankMessage | _Ended] = queue.Queue(MAX_WAITING_MESSAGES)
        self._is_over = False
        self._waiting: list[threading.Thread] = []
        self._host = socket.gethostname()

    def __enter__(self) -> _LocalWorld:
        with ExitStack() as stack:
            secret = new_secret()
            coordinator, self._client = _serve_rendezvous(secret, self._num_ranks, stack)
            self._assignment["secret"] = secret.hex()
            self._assignment["coordinator"] = coordinator.address.to_bytes().decode()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True  # further messages of the ranks are dropped
        for rank in self._ranks:
            rank.stop(StopReason("the launcher has ended all ranks"))
        for thread in self._waiting:
            thread.join()
        self._stack.close()
        end_idle_forkservers(_IDLE_S)

    def start(
        self, rank: int, payload: bytes, environment: Mapping[str, str], modules: Sequence[str]
    ) -> None:
        with ExitStack() as inherited:
            fds, of_launch = {}, {}
            if self._with_mpi:
                fds["PMI_FD"] = self._serve_pmi(rank, inherited)
                of_launch = pmi_environment(fds["PMI_FD"], rank, self._num_ranks)
            supervisor = RankSupervisor(
                rank=rank,
                payload=payload,
                environment=environment,
                more_variables=of_launch,
                modules=modules,
                inherited=fds,
                on_line=lambda line: self._put(RankMessage(rank=rank, line=line)),
                on_event=lambda event: self._put(RankMessage(rank=rank, event=event)),
            )
            self._stack.enter_context(supervisor)
        self._ranks.append(supervisor)
        supervisor.begin({**self._assignment, "rank": rank})
        thread = threading.Thread(target=self._await, args=(rank,), name=f"sparkdl-rank-{rank}", daemon=True)
        self._waiting.append(thread)
        thread.start()

    def collect(self, listener: Listener, limits: HangLimits) -> list[Any]:
        """Pass on messages until all ranks have ended, and return their values; end all ranks once one has failed."""
        failures: list[Failure] = []
        running = set(range(self._num_ranks))
        watch, num_polls, poll_at = HangWatch(limits), 0, time.monotonic()
        while running:
            if time.monotonic() >= poll_at:
                num_polls, poll_at = num_polls + 1, time.monotonic() + _POLL_S
                self._end_if_hanging(watch, num_polls, running)
            try:
                message = self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(message, RankMessage):
                listener.handle(message)
                continue
            running.remove(message.rank)
            if message.failure is None:
                continue
            failures.append(replace(message.failure, host=self._host))
            for rank in self._ranks:
                rank.stop(StopReason(f"rank {message.rank} on {self._host} failed: {message.failure.error}"))
        culprit = find_culprit(failures)
        if culprit is not None:
            if culprit.is_consequence:
                raise_hang(failures, limits)
            returned = set(range(self._num_ranks)) - {failure.rank for failure in failures}
            were_lost = were_ranks_lost(failures, returned, self._num_ranks)
            error = link_error(failures, self._num_ranks) or rank_error(culprit, were_lost)
            raise error from culprit.exception
        return [self._load(rank) for rank in self._ranks]

    def _end_if_hanging(self, watch: HangWatch, num_polls: int, running: Collection[int]) -> None:
        now = time.monotonic()
        hang = watch.observe(
            now, {rank: HealthReport(now, num_polls, self._ranks[rank].health()) for rank in running}
        )
        if hang is not None:
            for rank in self._ranks:
                rank.stop(StopReason(hang.why, is_hang=True))

    def _await(self, rank: int) -> None:
        self._put(_Ended(rank, self._ranks[rank].wait()))

    def _put(self, message: RankMessage | _Ended) -> None:
        while not self._is_over:
            try:
                self._inbox.put(message, timeout=1.0)
            except queue.Full:
                continue  # the caller's thread is busy; check again whether the launch is over
            return

    def _serve_pmi(self, rank: int, inherited: ExitStack) -> int:
        ours, theirs = socket.socketpair()
        inherited.enter_context(theirs)
        server = PmiServer(
            ours,
            self._client.prefix("mpi"),
            rank,
            self._num_ranks,
            host_of_rank=[0] * self._num_ranks,
            timeout_s=self._assignment["operation_timeout_s"],
        )
        self._stack.enter_context(server)
        return theirs.fileno()

    @staticmethod
    def _load(rank: RankSupervisor) -> Any:
        rank.result.seek(0)
        return pickle.load(rank.result)  # noqa: S301 - came from our own process over a pair of sockets


def _variables(
    environment: Mapping[str, str], gpus: Sequence[str] | None, num_threads: int
) -> dict[str, str]:
    variables = rank_environment(environment, gpus=gpus, num_threads=num_threads)
    if "" in sys.path and "PYTHONPATH" not in environment:
        # A notebook imports modules from its own folder.
        variables["PYTHONPATH"] = os.pathsep.join([os.getcwd(), variables["PYTHONPATH"]])
    return variables


def gpus_of(
    rank: int, gpus_per_rank: int, environ: Mapping[str, str], gpus: Path = _GPUS
) -> list[str] | None:
    """Addresses of a rank's GPUs, among the GPUs that this process sees; None if ``gpus_per_rank`` is 0."""
    if gpus_per_rank == 0:
        return None
    wanted = range(rank * gpus_per_rank, (rank + 1) * gpus_per_rank)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else wanted.stop
        if wanted.stop > num_gpus:
            raise LaunchError(
                f"Rank {rank} was to have GPUs {', '.join(map(str, wanted))}, counted from 0, and this machine has "
                f"{num_gpus}. Lower the number of ranks or of GPUs per rank."
            )
        return [str(number) for number in wanted]
    addresses = [address for address in visible.split(",") if address]
    if wanted.stop > len(addresses):
        raise LaunchError(
            f"Rank {rank} was to have GPUs {', '.join(map(str, wanted))} of those in CUDA_VISIBLE_DEVICES={visible}, "
            f"which names {len(addresses)}. Lower the number of ranks or of GPUs per rank, or name more GPUs."
        )
    return [addresses[number] for number in wanted]


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
        threads_per_rank: number of threads of each rank; by default as for :func:`run_on_local_ranks`.
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
            self._coordinator, self._client = _serve_rendezvous(secret, self._num_ranks, stack)
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
        """Wait until all ranks have ended with status 0, or until one has failed; then end the others.

        Returns:
            The failed rank; None if all ranks have ended with status 0.

        Raises:
            OSError: if ``on_line`` raised it; the ranks are ended when the context is left.
        """
        for _ in range(self._num_ranks):
            rank = self._next_ended()
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

    def _start(self, job: Job, stack: ExitStack) -> None:
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
                    separate_errors=True,
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

    def _next_ended(self) -> int:
        ended = self._ended.get()
        if isinstance(ended, OSError):
            raise ended
        return ended

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
