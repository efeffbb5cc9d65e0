"""The function of a barrier task: start its rank, meet the other tasks, relay and watch the rank, yield how it ended.

The rank imports what it needs while the tasks meet.

A failing rank does not fail its Spark task: the task yields the failure as a row. The driver thus gets a row from every
rank, with more information than Spark's exception has.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import IO, TYPE_CHECKING

from sparkdl.collective import Coordinator, RendezvousClient, uses_mpi
from sparkdl.collective.job import RankJob
from sparkdl.cores import threads_of_task
from sparkdl.launch.hangs.watch import HangWatch
from sparkdl.launch.rank.environment import gpus_of_rank, rank_environment
from sparkdl.launch.task.meeting import FailureBoard, Meeting, Peer
from sparkdl.launch.task.program import Program, ProgramSupervisor
from sparkdl.launch.task.supervisor import RankSupervisor, Supervisor
from sparkdl.launch.wire.channel import DriverLink
from sparkdl.launch.wire.messages import CHUNK_BYTES
from sparkdl.launch.wire.outcome import Failure, HealthReport, RankHealth, StopReason
from sparkdl.launch.wire.spec import LaunchSpec, installed_versions, version_conflicts
from sparkdl.rendezvous.addresses import (
    LOOPBACK,
    Address,
    hosts_known_as,
    is_loopback,
    reachable_hosts,
)
from sparkdl.rendezvous.hosts import Mark, find_hosts, is_marked
from sparkdl.rendezvous.pmi import PmiServer, pmi_environment

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext, TaskContext

CONNECT_TIMEOUT_S = 60.0
LEAST_MEETING_S = 30.0
"""Shortest timeout of the meeting, if the start timeout is shorter: Spark's ``allGather`` polls once a second."""

Row = tuple[str, int, bytes]
"""Kind (``result``, ``failure``, ``error``, ``refused``, ``log``), number of the chunk, body."""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One of the tasks of a launch, whatever runs it.

    Attributes:
        rank: number of the task and of its rank.
        hosts: the hosts of all tasks, as Spark names them; this task's host is the first.
        gpus: addresses of the GPUs assigned to this task; None if the ranks of a host take its GPUs in turn.
        cpus: number of cores reserved for the task.
        all_gather: exchanges a text with all tasks, for which each of them has to call it.
        program: what the rank runs instead of the function of the spec; None to run that.
    """

    rank: int
    hosts: Sequence[str]
    gpus: Sequence[str] | None
    cpus: int
    all_gather: Callable[[str], list[str]]
    program: Program | None = None


def plain_task(context: TaskContext) -> RankTask:
    """Describe this task of Spark, which has a launch of one rank to itself."""
    gpus = context.resources().get("gpu")
    return RankTask(
        rank=0,
        hosts=[LOOPBACK],
        gpus=None if gpus is None else list(gpus.addresses),
        cpus=context.cpus(),
        all_gather=lambda text: [text],
    )


def spark_task(context: BarrierTaskContext) -> RankTask:
    """Describe this task of a barrier stage of Spark."""
    # Each address is host:port; an IPv6 address is in brackets.
    hosts = [info.address.rpartition(":")[0].strip("[]") for info in context.getTaskInfos()]
    rank, gpus = context.partitionId(), context.resources().get("gpu")
    return RankTask(
        rank=rank,
        hosts=[hosts.pop(rank), *hosts],
        gpus=None if gpus is None else list(gpus.addresses),
        cpus=context.cpus(),
        all_gather=context.allGather,
    )


def run_barrier_task(spec: LaunchSpec, task: RankTask) -> Iterator[Row]:
    """Run the rank of this task, and yield how it ended."""
    rank, host = task.rank, socket.gethostname()
    assert spec.driver is not None, "the driver listens before it starts tasks"
    with ExitStack() as stack:
        coordinator = _coordinator(spec, hosts_for_tasks(task.hosts), stack) if rank == 0 else None
        mark = stack.enter_context(Mark())
        link = stack.enter_context(DriverLink(spec.driver, spec.secret, rank=rank, host=host))
        pmi_sockets: tuple[socket.socket, ...] = (
            socket.socketpair() if spec.mpi or uses_mpi(spec.transport) else ()
        )
        for end in pmi_sockets:
            stack.enter_context(end)
        supervisor: Supervisor | None = None
        # Heartbeats begin before the meeting: if a task hung in it, the others would wait for ever.
        stack.enter_context(_heartbeats(spec, rank, link, lambda: supervisor))
        if task.program is None and (spec.gpus_per_rank == 0 or task.gpus is not None):
            supervisor = _start_rank(spec, task, 0, link, pmi_sockets, stack)
        mine = Peer(
            host=host,
            conflicts=version_conflicts(spec.versions, installed_versions()),
            mark=mark.name,
            coordinator=_text_of(coordinator),
        )
        meeting = stack.enter_context(Meeting(task.all_gather, link, mine))
        link.watch(meeting.abandon)
        peers = meeting.peers(max(spec.start_timeout_s, LEAST_MEETING_S))
        if any(peer.conflicts for peer in peers):
            conflicts = {f"on {peer.host}, {conflict}" for peer in peers for conflict in peer.conflicts}
            yield "refused", 0, "; ".join(sorted(conflicts)).encode()
            return
        if are_on_one_host(task.hosts) and not all(is_marked(peer.mark) for peer in peers):
            # Containers for which Spark has the same address have separate loopbacks. All tasks decide the same here:
            # if task A does not see the mark of task B, then B does not see the mark of A.
            coordinator = _coordinator(spec, reachable_hosts(), stack) if rank == 0 else None
            peers = meeting.meet_again(replace(mine, coordinator=_text_of(coordinator)))
        address = Address.from_bytes(peers[0].coordinator)
        client = RendezvousClient.connect(address, spec.secret, timeout_s=CONNECT_TIMEOUT_S)
        stack.enter_context(client)
        board = FailureBoard(client.view("tasks"), rank=rank, host=host, is_alone=spec.is_alone)
        hosts = find_hosts(
            client.view("tasks"), rank=rank, world_size=spec.num_ranks, timeout_s=CONNECT_TIMEOUT_S
        )
        pmi = _serve_pmi(spec, rank, client, hosts, pmi_sockets, stack) if pmi_sockets else None
        if task.program is not None:
            mpi = None if pmi is None else (pmi_sockets[1], pmi)
            supervisor = stack.enter_context(ProgramSupervisor(rank, task.program, client, link, mpi))
        elif supervisor is None:
            position = hosts[:rank].count(hosts[rank])
            supervisor = _start_rank(spec, task, position, link, pmi_sockets, stack)
        link.watch(supervisor.cancel)
        board.watch(supervisor.stop)
        job = RankJob(
            rank=rank,
            world_size=spec.num_ranks,
            coordinator=spec.roster or address,
            secret=spec.secret,
            transport=spec.transport,
            wire=spec.wire,
            timeout_s=spec.limits.operation_timeout_s,
        )
        supervisor.begin(job, None if spec.roster is None else spec.member)
        failure = supervisor.wait()
        if failure is None:
            yield from _chunks("result", supervisor.result)
        else:
            of_pmi = "" if pmi is None or pmi.failure is None else f" ({pmi.failure})"
            failure = replace(failure, host=host, error=f"{failure.error}{of_pmi}")
            yield from _report(failure, link, board)
        yield from _chunks("log", link.unsent)
        board.finish()
        if rank == 0:
            board.wait_until_finished(spec.num_ranks)


def _report(failure: Failure, link: DriverLink, board: FailureBoard) -> Iterator[Row]:
    link.failure(failure)
    board.post(failure, is_cancelled=link.is_stopped)
    yield "failure", 0, failure.to_json()
    yield from _chunks("error", io.BytesIO(failure.pickled))


def are_on_one_host(hosts: Sequence[str]) -> bool:
    """Whether Spark reports the same host for all tasks, or only loopback addresses."""
    return len(set(hosts)) == 1 or all(map(is_loopback, hosts))


def hosts_for_tasks(hosts: Sequence[str]) -> Sequence[str]:
    """The addresses of this machine at which tasks on ``hosts`` reach it; the first host is this machine."""
    if are_on_one_host(hosts):
        return [LOOPBACK]
    return hosts_known_as("The address of this executor in Spark", hosts[0])


def _coordinator(spec: LaunchSpec, host: Sequence[str], stack: ExitStack) -> Coordinator:
    return stack.enter_context(Coordinator(secret=spec.secret, world_size=spec.num_ranks, host=host))


def _text_of(coordinator: Coordinator | None) -> str:
    return "" if coordinator is None else coordinator.address.to_bytes().decode()


_LONGEST_BEAT_S, _SHORTEST_BEAT_S = 5.0, 0.1
_BEATS_PER_TIMEOUT = 8


@contextmanager
def _heartbeats(
    spec: LaunchSpec, rank: int, link: DriverLink, supervisor: Callable[[], Supervisor | None]
) -> Iterator[None]:
    """Report periodically to the driver, from a thread, that this task runs, and the health of its rank.

    If the driver is out of reach, as on many Spark Connect servers, the task itself checks whether its rank hangs.
    """
    watch, is_over = HangWatch(spec.limits), threading.Event()
    shortest_s = min(spec.limits.hang_timeout_s, spec.limits.silence_timeout_s)
    interval_s = min(_LONGEST_BEAT_S, max(_SHORTEST_BEAT_S, shortest_s / _BEATS_PER_TIMEOUT))

    def beat() -> None:
        for number in count(1):
            if is_over.wait(interval_s):
                return
            started = supervisor()
            health = RankHealth() if started is None else started.health()
            if link.heartbeat(number, health):
                continue
            now = time.monotonic()
            hang = watch.observe(now, {rank: HealthReport(now, number, health)})
            if hang is not None:
                assert started is not None, "only a started rank can hang"
                started.stop(StopReason(hang.why, is_hang=True))
                return

    threading.Thread(target=beat, name="sparkdl-heartbeat", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _serve_pmi(
    spec: LaunchSpec,
    rank: int,
    client: RendezvousClient,
    hosts: Sequence[int],
    pmi_sockets: Sequence[socket.socket],
    stack: ExitStack,
) -> PmiServer:
    """Serve the rank's end of MPICH's bootstrap connection, the other end of the sockets."""
    pmi = PmiServer(
        pmi_sockets[0],
        client.view("mpi"),
        rank,
        len(hosts),
        host_of_rank=hosts,
        timeout_s=spec.limits.operation_timeout_s,
    )
    return stack.enter_context(pmi)


def _start_rank(
    spec: LaunchSpec,
    task: RankTask,
    position_on_host: int,
    link: DriverLink,
    pmi_sockets: Sequence[socket.socket],
    stack: ExitStack,
) -> RankSupervisor:
    """Start this task's rank, with its end of MPICH's bootstrap connection; the rank waits for its assignment."""
    gpus = gpus_of_rank(task.gpus, spec.gpus_per_rank, position_on_host)
    num_threads = threads_of_task(spec.num_threads, task.cpus)
    environment = rank_environment(dict(spec.environment), gpus=gpus, num_threads=num_threads)
    inherited = {}
    of_launch = {}
    if pmi_sockets:
        inherited["PMI_FD"] = pmi_sockets[1].fileno()
        of_launch = pmi_environment(inherited["PMI_FD"], task.rank, spec.num_ranks)
    supervisor = RankSupervisor(
        rank=task.rank,
        payload=spec.payload,
        environment=environment,
        more_variables=of_launch,
        # A process that has initialized CUDA cannot be forked, and an import could initialize it.
        modules=() if spec.gpus_per_rank else spec.modules,
        inherited=inherited,
        on_start=link.report_start,
        on_line=link.line,
        on_event=link.event,
    )
    return stack.enter_context(supervisor)


def _chunks(kind: str, file: IO[bytes]) -> Iterator[Row]:
    file.seek(0)
    number = 0
    while chunk := file.read(CHUNK_BYTES):
        yield kind, number, chunk
        number += 1
