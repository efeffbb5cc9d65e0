"""``hvd.barrier`` and ``hvd.join``."""

from __future__ import annotations

from sparkdl.horovod.torch.handles import run_now
from sparkdl.horovod.torch.process_sets import ProcessSet, engine_of, global_process_set
from sparkdl.horovod.torch.requests.meeting import BarrierRequest, JoinRequest


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of a process set has arrived."""
    run_now(engine_of(process_set, "Barrier"), BarrierRequest("barrier"))


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Meanwhile this rank gives zeros to what the others ``allreduce`` (an average is over all ranks all the same), and
    takes part in their ``barrier``. Anything else that they do fails.

    Args:
        device: without effect; Horovod makes its zeros there.

    Returns:
        The rank that joined last.
    """
    return run_now(engine_of(global_process_set, "Join"), JoinRequest())
