"""Runs a function or a program on ranks that are processes of this machine, without Spark.

The tasks of these ranks are threads of the calling process.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.checks import check_counts
from sparkdl.cores import threads_of_local_rank
from sparkdl.errors import LaunchError, count_of
from sparkdl.launch.elastic.offers import SlotOffer
from sparkdl.launch.forkserver.reuse import end_idle_forkservers
from sparkdl.launch.hangs.watch import hang_limits
from sparkdl.launch.local_stage import LocalStage
from sparkdl.launch.ranks import check_spec, run_spec
from sparkdl.launch.task.program import HAS_MET, OnLine, Program
from sparkdl.launch.wire.messages import pickle_call
from sparkdl.launch.wire.spec import LaunchSpec
from sparkdl.rendezvous.addresses import LOOPBACK

if TYPE_CHECKING:
    from sparkdl.launch.elastic.offers import Invitation
    from sparkdl.launch.elastic.roster import ElasticLimits
    from sparkdl.launch.supervision import OnEvent, OnLog

_logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0

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
    elastic: ElasticLimits | None = None,
    leases: Iterator[str] | None = None,
    hosts: Sequence[str] = (LOOPBACK,),
    on_open: Callable[[Invitation], None] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(context, *args, **kwargs)`` in one process of this machine per rank, and return all values.

    The arguments have the same meaning as those of :func:`~sparkdl.launch.run_on_ranks`; those that concern Spark
    (``spark``, ``resources``, ``start_timeout_s``, ``on_wait``) do not exist here. Each rank gets the next
    ``gpus_per_rank`` GPUs and, unless ``threads_per_rank`` or ``OMP_NUM_THREADS`` is set, a thread per core of its
    share of the machine, which is less where a container has a quota.

    To an elastic launch other processes can add ranks; see :func:`offer_local_slots`. ``on_open`` is called with the
    invitation that they need, and ``hosts`` are the addresses of this machine at which they reach it.

    Raises:
        ParamError: if an argument has a value that cannot work.
        SerializationError: if function or arguments cannot be pickled.
        LaunchError: if the ranks cannot be started.
        RankError: if a rank fails; the error names the first failed rank, and ``__cause__`` is that rank's exception.
        HangError: if a rank hangs; the error names the rank and where it was. The log has the stacks of all ranks.
    """
    num_threads = threads_per_rank or threads_of_local_rank(max(1, num_ranks))
    spec = LaunchSpec(
        num_ranks=num_ranks,
        payload=pickle_call(function, args, kwargs),
        transport=transport,
        wire=wire,
        gpus_per_rank=gpus_per_rank,
        num_threads=num_threads,
        mpi=mpi and elastic is None,
        environment=tuple((environment or {}).items()),
        modules=tuple(modules),
        limits=hang_limits(hang_timeout_s, operation_timeout_s, silence_timeout_s),
    )
    check_spec(spec, elastic)
    most = num_ranks if elastic is None else elastic.most
    gpus = [gpus_of(rank, gpus_per_rank, os.environ) for rank in range(most)]
    check_loopback()
    _logger.info(
        "Starting %d ranks on this machine with %s each.", num_ranks, count_of(num_threads, "thread")
    )
    try:
        return run_spec(
            lambda spec, slot: LocalStage(spec, gpus[slot:]),
            spec,
            host=hosts,
            on_log=on_log,
            on_event=on_event,
            elastic=elastic,
            leases=leases,
            on_open=on_open,
        )
    finally:
        end_idle_forkservers(_IDLE_S)


def run_program_on_local_ranks(
    command: Sequence[str],
    *,
    num_ranks: int,
    transport: str = "auto",
    wire: str = "float32",
    timeout_s: float = 300.0,
    threads_per_rank: int | None = None,
    on_line: OnLine,
    on_met: Callable[[], None],
) -> None:
    """Run a program in one process of this machine per rank, until all have ended with status 0 or one has failed.

    The processes also end if this process dies.

    Args:
        command: the program and its arguments.
        num_ranks: number of ranks.
        transport: as for :func:`run_on_local_ranks`; with ``"mpi"`` and ``"hierarchical-mpi"`` the ranks also form an
            MPI world.
        wire: as for :func:`run_on_local_ranks`.
        timeout_s: seconds for opening the communicator, and the default deadline of its operations.
        threads_per_rank: as for :func:`run_on_local_ranks`.
        on_line: called with rank, stream and line for each line that the ranks print, from one thread per rank and
            stream.
        on_met: called if any rank has opened the communicator, begun to initialize torch.distributed, or initialized
            MPI. Otherwise the ranks have worked independently, unless they have connected by other means, such as a
            ``TCPStore`` of their own.

    Raises:
        ParamError: if an argument has a value that cannot work.
        LaunchError: if the program cannot be started.
        RankError: if a rank fails; the error names the first failed rank. ``__cause__`` is a
            :class:`subprocess.CalledProcessError` with the exit status of its process, or the ``OSError`` that
            ``on_line`` raised.
    """
    num_threads = threads_per_rank or threads_of_local_rank(max(1, num_ranks))
    spec = LaunchSpec(
        num_ranks=num_ranks,
        transport=transport,
        wire=wire,
        num_threads=num_threads,
        limits=hang_limits(math.inf, timeout_s),  # programs send no heartbeats
    )
    check_spec(spec)
    check_loopback()
    program = Program(command=command, num_threads=num_threads, on_line=on_line)

    def on_event(_rank: int, event: dict[str, Any]) -> None:
        if event == HAS_MET:
            on_met()

    run_spec(
        lambda spec, _: LocalStage(spec, [None] * num_ranks, program),
        spec,
        host=LOOPBACK,
        on_event=on_event,
    )


def offer_local_slots(
    invitation: Invitation,
    *,
    num_ranks: int,
    threads_per_rank: int | None = None,
    environment: Mapping[str, str] | None = None,
    max_restarts: int,
) -> SlotOffer:
    """Make an offer of slots on this machine to an elastic launch of another process; its ``run`` runs their ranks.

    Args:
        invitation: invitation of the launch.
        num_ranks: number of ranks that may run here.
        threads_per_rank: as for :func:`run_on_local_ranks`.
        environment: environment variables for the ranks here.
        max_restarts: how many ranks are started here in place of those that have ended.

    Raises:
        ParamError: if an argument has a value that cannot work.
    """
    check_counts(
        least=1, num_ranks=num_ranks, threads_per_rank=1 if threads_per_rank is None else threads_per_rank
    )
    num_threads = threads_per_rank or threads_of_local_rank(num_ranks)
    variables = tuple((environment or {}).items())

    def make_stage(spec: LaunchSpec, _slot: int) -> LocalStage:
        modules = () if has_gpus() else spec.modules
        of_machine = replace(spec, num_threads=num_threads, environment=variables, modules=modules)
        return LocalStage(of_machine, [None])

    return SlotOffer(invitation, make_stage, num_slots=num_ranks, max_restarts=max_restarts)


def has_gpus() -> bool:
    """Whether this machine has GPUs of NVIDIA.

    Programs that choose theirs themselves may then not be forked from a process that has imported libraries: an import
    could have initialized CUDA.
    """
    return _GPUS.is_dir()


def check_loopback() -> None:
    """Check that this machine reaches itself, as ranks on one machine meet at its loopback address.

    Raises:
        LaunchError: if the loopback interface does not work.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise LaunchError(
            f"Ranks on one machine meet at {LOOPBACK}, and this machine does not reach itself there: {error}. Bring "
            "its loopback interface up, as by `ip link set lo up`."
        ) from error


def gpus_of(
    rank: int, gpus_per_rank: int, environ: Mapping[str, str], gpus: Path = _GPUS
) -> list[str] | None:
    """Addresses of a rank's GPUs, among the GPUs that this process sees; None if ``gpus_per_rank`` is 0."""
    if gpus_per_rank == 0:
        return None
    first, end = rank * gpus_per_rank, (rank + 1) * gpus_per_rank
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        addresses = [address for address in visible.split(",") if address]
    else:
        num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else end
        addresses = [str(number) for number in range(num_gpus)]
    if end > len(addresses):
        where = "this machine has" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} names"
        raise LaunchError(
            f"Rank {rank} was to have GPUs {', '.join(map(str, range(first, end)))}, counted from 0, and {where} "
            f"{len(addresses)}. Lower the number of ranks or of GPUs per rank."
        )
    return addresses[first:end]
