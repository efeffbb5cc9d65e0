"""What a barrier task does: meet the others, start its rank, relay and watch it, yield how it ended.

Runs on an executor.

A failing rank does not fail its Spark task: its failure is a row, which brings the driver more than Spark's exception
would, and from every rank.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sparkdl.collective import Coordinator, RendezvousClient
from sparkdl.collective.addresses import Address
from sparkdl.collective.pmi import PmiServer, pmi_environment
from sparkdl.launch.driver_link import DriverLink
from sparkdl.launch.failure_board import FailureBoard
from sparkdl.launch.launch_spec import LaunchSpec, installed_versions, version_conflicts
from sparkdl.launch.messages import CHUNK_BYTES
from sparkdl.launch.rank_environment import assigned_gpus, rank_environment
from sparkdl.launch.rank_supervisor import RankSupervisor
from sparkdl.topology import number_hosts

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

CONNECT_TIMEOUT_S = 60.0

Row = tuple[str, int, bytes]
"""Kind (``result``, ``failure``, ``error``, ``refused``, ``log``), number of the chunk, body."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What every task tells the others before any rank is started."""

    host: str
    conflicts: list[str]
    coordinator: str
    shared_memory: str


def run_barrier_task(spec: LaunchSpec, context: BarrierTaskContext) -> Iterator[Row]:
    """Run the rank that this task stands for, and yield how it ended."""
    rank, host = context.partitionId(), socket.gethostname()
    with ExitStack() as stack:
        coordinator = None
        if rank == 0:
            coordinator = stack.enter_context(Coordinator(secret=spec.secret, world_size=spec.num_ranks))
        peers = _meet(spec, context, coordinator)
        if any(peer.conflicts for peer in peers):
            yield "refused", 0, "; ".join(_conflicts(peers)).encode()
            return
        address = Address.from_bytes(peers[0].coordinator)
        client = RendezvousClient.connect(address, spec.secret, timeout_s=CONNECT_TIMEOUT_S)
        stack.enter_context(client)
        board = FailureBoard(client.prefix("tasks"))
        link = stack.enter_context(DriverLink(spec.driver, spec.secret, rank=rank, host=host))
        position = [peer.host for peer in peers[:rank]].count(host)
        environment = rank_environment(
            dict(spec.environment), gpus=assigned_gpus(context, spec.gpus_per_rank, position)
        )
        inherited = []
        if spec.transport == "mpi":
            inherited.append(_serve_pmi(stack, client, rank, peers).fileno())
            environment.update(pmi_environment(inherited[0], rank, spec.num_ranks))
        supervisor = RankSupervisor(
            order=_order(spec, rank, address),
            payload=spec.payload,
            environment=environment,
            pass_fds=inherited,
            on_line=link.line,
            on_event=link.event,
        )
        stack.enter_context(supervisor)
        link.started()
        link.watch(supervisor.stop)
        board.watch(supervisor.stop)
        failure = supervisor.wait()
        if failure is None:
            yield from _chunks("result", supervisor.result)
        else:
            failure = replace(failure, host=host)
            link.failure(failure)
            board.post(failure)
            yield "failure", 0, failure.to_json().encode()
            if failure.pickled:
                yield "error", 0, failure.pickled
        yield from _chunks("log", link.unsent)
        board.finish(rank)
        if rank == 0:
            board.wait_until_finished(spec.num_ranks)


def _meet(spec: LaunchSpec, context: BarrierTaskContext, coordinator: Coordinator | None) -> list[Peer]:
    mine = {
        "host": socket.gethostname(),
        "conflicts": version_conflicts(spec.versions, installed_versions()),
        "coordinator": coordinator.address.to_bytes().decode() if coordinator is not None else "",
        "shared_memory": _shared_memory_identity(),
    }
    gathered = [json.loads(text) for text in context.allGather(json.dumps(mine))]
    return [Peer(**peer) for peer in gathered]


def _conflicts(peers: list[Peer]) -> list[str]:
    return sorted({f"on {peer.host}, {conflict}" for peer in peers for conflict in peer.conflicts})


def _order(spec: LaunchSpec, rank: int, coordinator: Address) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": spec.num_ranks,
        "secret": spec.secret.hex(),
        "coordinator": coordinator.to_bytes().decode(),
        "transport": spec.transport,
        "operation_timeout_s": spec.operation_timeout_s,
    }


def _serve_pmi(stack: ExitStack, client: RendezvousClient, rank: int, peers: list[Peer]) -> socket.socket:
    """Serve MPICH's bootstrap to this task's rank; returns the end of the socket pair that the rank inherits."""
    ours, theirs = socket.socketpair()
    stack.enter_context(theirs)
    stack.enter_context(
        PmiServer(
            ours,
            client.prefix("pmi"),
            rank,
            len(peers),
            host_of_rank=number_hosts([peer.shared_memory for peer in peers]),
        )
    )
    return theirs


def _shared_memory_identity() -> str:
    """Equal in two processes only if they see the same /dev/shm of the same running kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/dev/shm').st_dev}"  # noqa: S108 - looked at, not written to


def _chunks(kind: str, file: IO[bytes]) -> Iterator[Row]:
    file.seek(0)
    number = 0
    while chunk := file.read(CHUNK_BYTES):
        yield kind, number, chunk
        number += 1
