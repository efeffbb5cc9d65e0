"""Which GPUs ranks of one host see, for programs that choose theirs by ``local_rank``. Runs on a *rank*."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkdl.collective import all_gather_bytes

if TYPE_CHECKING:
    from sparkdl.launch import RankContext

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
    visible = joined([json.loads(gathered[rank]) for rank in topology.ranks_on(topology.host)])
    if visible is not None:
        os.environ[_VISIBLE] = visible


def joined(visible: Sequence[str]) -> str | None:
    """Join what the ranks of a host see, by local rank; None where they had better see what they saw before.

    That is where some rank has no GPU of its own, where ranks share GPUs, or where one has several: then the number of
    a rank on its host is not that of its GPU.
    """
    if len(set(visible)) < len(visible) or any(not each or "," in each for each in visible):
        return None
    return ",".join(visible)
