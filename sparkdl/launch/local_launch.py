"""Runs a function on ranks that are processes of this machine, without Spark, and returns what it returned on each.

Runs where it is called, which stands for the driver and for the barrier tasks at once.
:mod:`sparkdl.launch.local_ranks` does the same for a program that finds the others by its environment variables.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from sparkdl.collective import (
    Coordinator,
    PmiServer,
    RendezvousClient,
    check_timeout,
    check_transport,
    new_secret,
    pmi_environment,
    uses_mpi,
)
from sparkdl.errors import LaunchError, ParamError
from sparkdl.launch.collect import rank_error
from sparkdl.launch.driver_channel import MAX_WAITING_MESSAGES, RankMessage
from sparkdl.launch.hang_report import raise_hang
from sparkdl.launch.hang_watch import HangLimits, HangWatch, hang_limits
from sparkdl.launch.kept_nurseries import end_idle_processes
from sparkdl.launch.outcome import Failure, StopReason, find_culprit, were_ranks_lost
from sparkdl.launch.packed_error import unpack_error
from sparkdl.launch.payload import pickle_call
from sparkdl.launch.rank_environment import rank_environment
from sparkdl.launch.rank_supervisor import RankSupervisor
from sparkdl.launch.run import Listener, OnEvent, OnLog

_CONNECT_TIMEOUT_S = 10.0

_LOOK_S = 0.5
"""How often it is looked whether a rank hangs."""

_GPUS = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU of the machine, where NVIDIA's driver is."""

_IDLE_S = 60.0
"""How long processes that have imported what the ranks need stay for the next launch: as long as on a cluster."""


def run_on_local_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    transport: str = "auto",
    wire: str = "float32",
    gpus_per_rank: int = 0,
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

    Arguments, value and errors are those of :func:`~sparkdl.launch.run_on_ranks`. The ranks share the machine's cores
    (``OMP_NUM_THREADS``, where it is not set), and take its GPUs in turn.

    Raises:
        ParamError: if an argument has a value that cannot work.
        SerializationError: if function or arguments cannot be pickled.
        LaunchError: if the ranks cannot be started.
        RankError: if a rank fails; it names the first one, and its ``__cause__`` is that rank's exception.
        HangError: if a rank hangs; it names that rank and where it was. The log has the stacks of all ranks.
    """
    if num_ranks < 1:
        raise ParamError(f"The number of ranks must be at least 1, got {num_ranks}.")
    if gpus_per_rank < 0:
        raise ParamError(f"The number of GPUs per rank cannot be negative, got {gpus_per_rank}.")
    check_transport(transport, wire)
    check_timeout(operation_timeout_s, "operation_timeout_s")
    limits = hang_limits(hang_timeout_s, operation_timeout_s, silence_timeout_s)
    payload = pickle_call(function, args, kwargs)
    order = {
        "world_size": num_ranks,
        "transport": transport,
        "wire": wire,
        "operation_timeout_s": operation_timeout_s,
    }
    with _LocalWorld(order, with_mpi=mpi or uses_mpi(transport)) as world:
        for rank in range(num_ranks):
            gpus = _gpus_of(rank, gpus_per_rank, os.environ)
            variables = _variables(environment or {}, gpus, num_ranks)
            world.start(rank, payload, variables, () if gpus_per_rank else modules)
        return world.collect(Listener(on_log, on_event), limits)


@dataclass(frozen=True)
class _Ended:
    """That a rank has ended, after all that it said."""

    rank: int
    failure: Failure | None


class _LocalWorld:
    """The coordinator of the ranks, their processes, and what they say; a context manager that ends all of them."""

    def __init__(self, order: dict[str, Any], *, with_mpi: bool) -> None:
        self._order, self._with_mpi = order, with_mpi
        self._num_ranks: int = order["world_size"]
        self._ranks: list[RankSupervisor] = []
        self._heard: queue.Queue[RankMessage | _Ended] = queue.Queue(MAX_WAITING_MESSAGES)
        self._is_over = False
        self._waiting: list[threading.Thread] = []
        self._host = socket.gethostname()

    def __enter__(self) -> _LocalWorld:
        with ExitStack() as stack:
            secret = new_secret()
            coordinator = stack.enter_context(
                Coordinator(secret=secret, world_size=self._num_ranks, host="127.0.0.1")
            )
            self._order["secret"] = secret.hex()
            self._order["coordinator"] = coordinator.address.to_bytes().decode()
            self._client = stack.enter_context(
                RendezvousClient.connect(coordinator.address, secret, _CONNECT_TIMEOUT_S)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True  # what the ranks still say is not waited for
        for rank in self._ranks:
            rank.stop(StopReason("whoever started the ranks has ended them"))
        for thread in self._waiting:
            thread.join()
        self._stack.close()
        end_idle_processes(_IDLE_S)

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
                on_line=lambda line: self._hear(RankMessage(rank=rank, line=line)),
                on_event=lambda event: self._hear(RankMessage(rank=rank, event=event)),
            )
            self._stack.enter_context(supervisor)
        self._ranks.append(supervisor)
        supervisor.begin({**self._order, "rank": rank})
        thread = threading.Thread(target=self._await, args=(rank,), name=f"sparkdl-rank-{rank}", daemon=True)
        self._waiting.append(thread)
        thread.start()

    def collect(self, listener: Listener, limits: HangLimits) -> list[Any]:
        """Listen until all ranks have ended, the others soon after the first that failed; return their values."""
        failures: list[Failure] = []
        running = set(range(self._num_ranks))
        watch, num_looks, looks_at = HangWatch(limits), 0, time.monotonic()
        while running:
            if time.monotonic() >= looks_at:
                num_looks, looks_at = num_looks + 1, time.monotonic() + _LOOK_S
                self._end_a_hang(watch, num_looks, running)
            try:
                news = self._heard.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(news, RankMessage):
                listener.hear(news)
                continue
            running.remove(news.rank)
            if news.failure is None:
                continue
            failures.append(replace(news.failure, host=self._host))
            for rank in self._ranks:
                rank.stop(StopReason(f"rank {news.rank} on {self._host} failed: {news.failure.error}"))
        culprit = find_culprit(failures)
        if culprit is not None:
            if culprit.is_consequence:
                raise_hang(failures, limits)
            returned = set(range(self._num_ranks)) - {failure.rank for failure in failures}
            were_lost = were_ranks_lost(failures, returned, self._num_ranks)
            raise rank_error(culprit, were_lost) from unpack_error(culprit.pickled)
        return [self._load(rank) for rank in self._ranks]

    def _end_a_hang(self, watch: HangWatch, num_looks: int, running: Collection[int]) -> None:
        now = time.monotonic()
        hang = watch.look(now, {rank: (now, num_looks, self._ranks[rank].signs()) for rank in running})
        if hang is not None:
            for rank in self._ranks:
                rank.stop(StopReason(hang.why, is_hang=True))

    def _await(self, rank: int) -> None:
        self._hear(_Ended(rank, self._ranks[rank].wait()))

    def _hear(self, news: RankMessage | _Ended) -> None:
        while not self._is_over:
            try:
                self._heard.put(news, timeout=1.0)
            except queue.Full:
                continue  # the caller's thread is busy; look whether it has left
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
            timeout_s=self._order["operation_timeout_s"],
        )
        self._stack.enter_context(server)
        return theirs.fileno()

    @staticmethod
    def _load(rank: RankSupervisor) -> Any:
        rank.result.seek(0)
        return pickle.load(rank.result)  # noqa: S301 - came from our own process over a pair of sockets


def _variables(environment: Mapping[str, str], gpus: Sequence[str] | None, num_ranks: int) -> dict[str, str]:
    share = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    inherited = {"OMP_NUM_THREADS": str(share), **os.environ}
    variables = rank_environment(environment, gpus=gpus, inherited=inherited)
    if "" in sys.path and "PYTHONPATH" not in environment:
        # A notebook imports what lies beside it.
        variables["PYTHONPATH"] = os.pathsep.join([os.getcwd(), variables["PYTHONPATH"]])
    return variables


def _gpus_of(
    rank: int, gpus_per_rank: int, environ: Mapping[str, str], gpus: Path = _GPUS
) -> list[str] | None:
    """Addresses of a rank's GPUs, of those that this process sees; None where the choice is the rank's."""
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
