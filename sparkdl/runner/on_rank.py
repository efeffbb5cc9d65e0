"""What the ranks of a Runner do: make everything ready, call the function, put everything away. Runs on a *rank*."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError
from sparkdl.runner.gpu_sharing import see_gpus_of_host
from sparkdl.runner.rank_logging import set_up_logging
from sparkdl.runner.rank_progress import provide_progress

if TYPE_CHECKING:
    from sparkdl.launch import RankContext
    from sparkdl.runner.commit_folder import CommitFolder
    from sparkdl.runner.packed_call import Call
    from sparkdl.runner.script import Script

IMPORTED_FIRST = (__name__, "sparkdl.torch", "sparkdl.horovod.torch", "torch._dynamo")
"""Modules that every function needs; the last one is imported by the first optimizer of a process."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank has to know besides the call.

    Attributes:
        returns_all: whether the values of all ranks are wanted, or only rank 0's.
        gpus: how many are the rank's own.
        sees_gpus_of_host: whether the rank also sees those of the host's other ranks, by the order of local ranks.
        log_level: of the root logger; None leaves it alone.
        operation_timeout_s: deadline of a collective of torch.distributed that names none.
        commits: where the state's commits are kept; None to keep them in memory.
    """

    returns_all: bool
    gpus: int
    sees_gpus_of_host: bool
    log_level: int | None
    operation_timeout_s: float
    commits: CommitFolder | None


def run_on_rank(context: RankContext, setup: RankSetup, call: Call | Script) -> Any:
    """Run the call with everything ready, and return its value where that is wanted."""
    from sparkdl.torch import collective_errors

    with _ready(context, setup):
        try:
            # Else what torch makes of another rank's failure looks like one of this rank.
            with collective_errors():
                value = call.run()
        except ValueError as error:
            if "default process group twice" not in str(error):
                raise
            raise ParamError(
                "torch.distributed is initialized already on every rank, with the backend 'sparkdl'. Leave the call of "
                "init_process_group away, or make it only if not torch.distributed.is_initialized()."
            ) from error
    if context.rank == 0 or setup.returns_all:
        return _checked(value)
    return None


@contextmanager
def _ready(context: RankContext, setup: RankSetup) -> Iterator[None]:
    import sparkdl.horovod.torch as hvd
    from sparkdl.horovod.torch.elastic import provide_commit_keeper
    from sparkdl.torch import destroy_process_group, init_process_group

    set_up_logging(setup.log_level)
    if setup.sees_gpus_of_host:
        see_gpus_of_host(context)
    _set_variables(context, setup)
    provide_progress(context)
    if setup.commits is not None:
        provide_commit_keeper(setup.commits)
    # A process that looks for GPUs takes hundreds of MiB of the one that it finds.
    init_process_group(context.communicator, timeout_s=setup.operation_timeout_s, cuda=setup.gpus > 0)
    yield
    # After an exception the communicator is aborted, and the others with it.
    if hvd.is_initialized():
        hvd.shutdown()
    destroy_process_group()


def _set_variables(context: RankContext, setup: RankSetup) -> None:
    """Say to scripts what torchrun says, but for MASTER_ADDR and MASTER_PORT: nothing listens without a secret."""
    topology = context.topology
    alone = setup.gpus > 0  # it sees no GPUs but its own, which begin with number 0
    os.environ["RANK"] = str(context.rank)
    os.environ["WORLD_SIZE"] = str(context.world_size)
    os.environ["LOCAL_RANK"] = "0" if alone else str(topology.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = "1" if alone else str(topology.local_size)


def _checked(value: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(value, DistributedDataParallel):
        raise ParamError(
            "The function returned a DistributedDataParallel, which cannot leave the ranks' process group. "
            "Return its .module."
        )
    return value
