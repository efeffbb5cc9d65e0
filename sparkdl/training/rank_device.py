"""What a rank computes on: a GPU of its own, or its share of the host's cores. Runs on a *rank*."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from sparkdl.collective import Communicator


def choose_device(kind: str, communicator: Communicator) -> torch.device:
    """Return the device for ``"cpu"`` or ``"cuda"``, and make a GPU the current one.

    Raises:
        ParamError: if a GPU was asked for and torch sees none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if not num_devices:
        raise ParamError(
            f"Rank {communicator.rank} was asked to train on a GPU, but torch {torch.__version__} sees "
            "none there. Set gpusPerWorker to 0, or give the executors GPUs and a CUDA build of torch."
        )
    device = torch.device("cuda", communicator.topology.local_rank % num_devices)
    torch.cuda.set_device(device)
    return device


def cores_per_rank(ranks_on_host: int) -> int:
    """Return how many of this host's cores each of its ranks may use, one at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks_on_host)
