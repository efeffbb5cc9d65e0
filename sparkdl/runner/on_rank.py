"""Prepares a rank of a Runner, calls the function, and cleans up.

:func:`see_gpus_of_host` makes all GPUs of a host visible, for programs that select theirs by ``local_rank``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.collective import all_gather_bytes
from sparkdl.collective.current import Worlds, end_program, provided
from sparkdl.collective.error_origin import is_consequence
from sparkdl.collective.torchrun_variables import export_torchrun_variables
from sparkdl.errors import ParamError, RankLostError, count_of
from sparkdl.patches.accelerate import teach_accelerate
from sparkdl.runner.rank_logging import contexts, set_up_logging

if TYPE_CHECKING:
    from sparkdl.checkpoint.commit_place import CommitPlace
    from sparkdl.launch import RankContext
    from sparkdl.monitor import Monitor


_logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def see_gpus_of_host(context: RankContext) -> None:
    """Make the GPUs of all ranks of this host visible, in the order of their local ranks.

    Programs for Horovod call ``torch.cuda.set_device(hvd.local_rank())``, which a rank that sees only the GPU that
    Spark assigned to it cannot do. To be called before CUDA is initialized.
    """
    gathered = all_gather_bytes(
        context.communicator.rendezvous,
        key="runner/gpus",
        rank=context.rank,
        world_size=context.world_size,
        value=json.dumps(os.environ.get(_VISIBLE, "")).encode(),
        timeout_s=context.communicator.timeout_s,
    )
    topology = context.topology
    visible = join_visible_gpus([json.loads(gathered[rank]) for rank in topology.local_ranks])
    if visible is not None:
        os.environ[_VISIBLE] = visible


def join_visible_gpus(visible: Sequence[str]) -> str | None:
    """Join the visible GPUs of the ranks of a host, by local rank; None if they should not be changed.

    They should not be changed if a rank has no GPU, if ranks share GPUs, or if a rank has several GPUs: the local rank
    is then not the number of its GPU.
    """
    if len(set(visible)) < len(visible) or any(not address or "," in address for address in visible):
        return None
    return ",".join(visible)


IMPORTED_FIRST = (__name__, "sparkdl.torch", "torch._dynamo")
"""Modules that every function needs; the last one is imported when a process makes its first optimizer."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Options of a rank besides the call.

    Attributes:
        returns_all: whether the values of all ranks are wanted, or only rank 0's.
        gpus: number of GPUs of the rank.
        sees_gpus_of_host: whether the rank also sees the GPUs of the host's other ranks, in the order of local ranks.
        log_level: level of the root logger; None does not set it.
        operation_timeout_s: default deadline of the collectives of torch.distributed, in seconds.
        commits: place in which commits of states are kept; None to keep them in memory.
        init_torch: whether torch.distributed is to be initialized before the call.
        restart_count: number of times that the ranks have been restarted.
        max_restarts: maximum number of restarts, for any reason.
        monitor: settings of what samples the rank; None for no monitor.
    """

    returns_all: bool
    gpus: int
    sees_gpus_of_host: bool = False
    log_level: int | None = None
    operation_timeout_s: float
    commits: CommitPlace | None = None
    init_torch: bool
    restart_count: int = 0
    max_restarts: int
    monitor: Monitor | None = None


@dataclass(frozen=True)
class Returned:
    """The result of a rank.

    Attributes:
        value: return value of the function; None if it is not wanted.
        has_met: whether the rank has connected to the other ranks.
    """

    value: Any
    has_met: bool


def run_on_rank(context: RankContext, setup: RankSetup, call: Callable[[], Any]) -> Returned:
    """Prepare the rank, run the call, and return its value if it is wanted.

    In an elastic launch the call is made again, in the same process, when the ranks form another world: if one of them
    was lost, or if others join. A script without a state begins in a new process instead: what it has left in its
    modules belongs to a training that does not continue.
    """
    if not context.is_elastic:
        return _run_once(context, setup, call)
    from sparkdl.checkpoint.training_state import begin_world, has_states, progress
    from sparkdl.runner.script import Script
    from sparkdl.torch import destroy_process_group

    while True:
        begin_world()
        try:
            returned = _run_once(context, setup, call)
            if context.finish(progress=progress()):
                return returned
            if isinstance(call, Script) and not has_states():
                raise RankLostError("rank 0 was lost before the run was over")
        except Exception as error:
            if not context.can_continue(error):
                raise
            if isinstance(call, Script) and not has_states():
                # The driver starts another rank in place of this one.
                raise RankLostError("another rank was lost, and this script has no state") from error
            end_program()
            destroy_process_group()
            reason = f"{type(error).__name__}: {error}"
            traceback.clear_frames(error.__traceback__)
            context.meet_again(reason, progress=progress())


def _run_once(context: RankContext, setup: RankSetup, call: Callable[[], Any]) -> Returned:
    from sparkdl.torch import collective_errors

    with _ready(context, setup):
        try:
            # Otherwise torch's exception for the failure of another rank looks like a failure of this rank.
            with collective_errors():
                value = call()
        except ValueError as error:
            if not setup.init_torch or "initialize the default process group twice" not in str(error):
                raise  # torch has no class of its own for a second initialization
            raise ParamError(
                "torch.distributed is already initialized on every rank, with the backend 'sparkdl'. Remove the call "
                "of init_process_group, make it only if not torch.distributed.is_initialized(), or give the Runner "
                "init_torch=False."
            ) from error
        has_met = _has_met(context)
    is_wanted = context.rank == 0 or setup.returns_all
    return Returned(_check_result(value) if is_wanted else None, has_met)


@contextmanager
def _ready(context: RankContext, setup: RankSetup) -> Iterator[None]:
    from sparkdl.torch import destroy_process_group

    set_up_logging(setup.log_level)
    if setup.sees_gpus_of_host:
        see_gpus_of_host(context)
    if context.is_elastic:
        provided.worlds = _worlds_of(context, setup)
    contexts[:] = [context]
    provided.report = context.report
    teach_accelerate()
    _enter_world(context, setup)
    if setup.init_torch:
        _warn_without_gpu(context.rank, setup.gpus)
    monitor = setup.monitor
    with (
        nullcontext()
        if monitor is None
        else monitor.on_rank(context.rank, context.world_size, context.report) as sampler
    ):
        if sampler is not None:
            sampler.begin_program()
        yield
    # After an exception the communicator is aborted, which ends the other ranks.
    end_program()
    destroy_process_group()


def _enter_world(context: RankContext, setup: RankSetup) -> None:
    """Set what depends on the ranks that there are: variables, the place of commits, and torch.distributed."""
    from sparkdl.checkpoint.commit_place import CommitPlace
    from sparkdl.torch import init_process_group

    world = context.world
    # A rank with GPUs of its own sees only these, numbered from 0.
    export_torchrun_variables(
        context.job,
        context.topology,
        is_alone=setup.gpus > 0,
        restart_count=setup.restart_count if world is None else world.number - 1,
        max_restarts=setup.max_restarts,
    )
    if setup.commits is not None:
        commits = setup.commits if world is None else replace(setup.commits, lease=world.lease)
        CommitPlace.provided = commits
    if setup.init_torch:
        # A process that initializes CUDA takes hundreds of MiB of GPU memory.
        init_process_group(context.communicator, timeout_s=setup.operation_timeout_s, cuda=setup.gpus > 0)


def _worlds_of(context: RankContext, setup: RankSetup) -> Worlds:
    """How code without the context, such as that of Horovod's API, changes the world of this rank."""
    from sparkdl.torch import destroy_process_group

    def meet_again(reason: str, progress: int) -> None:
        while True:
            destroy_process_group()
            context.meet_again(reason, progress=progress)
            try:
                _enter_world(context, setup)
            except Exception as error:
                if not is_consequence(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
            else:
                return

    return Worlds(
        has_state=lambda: context.world is not None and context.world.has_state,
        is_to_leave=lambda: context.is_to_leave,
        meet_again=meet_again,
    )


def _warn_without_gpu(rank: int, gpus: int) -> None:
    """Log a warning if a rank was to have GPUs and torch sees none; other libraries may see them."""
    import torch

    if gpus and not torch.cuda.is_available():
        _logger.warning(
            "Rank %d was to have %s, and torch %s sees none there. Leave gpus_per_worker out, or give the "
            "machine GPUs and a CUDA build of torch.",
            rank,
            count_of(gpus, "GPU"),
            torch.__version__,
        )


def _has_met(context: RankContext) -> bool:
    """Whether this rank has opened the communicator, or has connected by torch.distributed or MPI."""
    import torch.distributed as dist

    from sparkdl.torch.registration import has_met

    mpi = sys.modules.get("mpi4py.MPI")
    is_in_mpi = mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1
    is_in_torch = dist.is_initialized() and dist.get_world_size() > 1
    return context.open_communicator is not None or has_met.is_set() or is_in_torch or is_in_mpi


def _check_result(value: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(value, DistributedDataParallel):
        raise ParamError(
            "The function returned a DistributedDataParallel, which cannot leave the ranks' process group. "
            "Return its .module."
        )
    return value
