"""NCCL for the tensors that lie on GPUs, where every rank has a GPU of its own.

Runs on the *rank*. The ranks tell each other their GPU; two ranks on one GPU cannot be in one NCCL group, and
then CUDA tensors are refused by the process group rather than copied through the CPU.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sparkdl.collective import Communicator, Rendezvous, all_gather_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


def nccl_group(
    communicator: Communicator, rendezvous: Rendezvous, store: Store, timeout_s: float
) -> dist.ProcessGroup | None:
    """A plain c10d group of NCCL over the same ranks, or None where not every rank has a GPU of its own.

    Every rank of the communicator makes this call.
    """
    gpus = all_gather_bytes(
        rendezvous,
        key="gpu",
        rank=communicator.rank,
        world_size=communicator.world_size,
        value=_own_gpu(),
        timeout_s=timeout_s,
    )
    if not have_own_gpus(gpus):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    rank, world_size = communicator.rank, communicator.world_size
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    return group


def have_own_gpus(gpus: Sequence[bytes]) -> bool:
    """Every rank named a GPU, and no two the same one."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def _own_gpu() -> bytes:
    """The UUID of this rank's current GPU, or nothing where it has none that NCCL could use."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return b""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).encode()
