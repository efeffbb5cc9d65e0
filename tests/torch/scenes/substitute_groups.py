"""Default groups with a substitute accelerator, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sparkdl.torch import RendezvousStore
from sparkdl.torch.process_group import SparkdlProcessGroup

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.torch.submission import Accelerator

_BACKEND = "substitute"


class DelegatingGroup(SparkdlProcessGroup):
    """A process group that gives CPU tensors to its accelerator, too, as if they were on a GPU."""

    def serves(self, tensor: torch.Tensor) -> bool:
        return False

    def serves_device(self, device: torch.device) -> bool:
        return False


@contextmanager
def default_group(
    kind: type[SparkdlProcessGroup],
    communicator: Communicator,
    store: RendezvousStore,
    accelerator: Accelerator,
    timeout_s: float,
) -> Iterator[None]:
    """Make a group of this kind, with this accelerator, the default group of torch.distributed for a while."""

    def create(options: dist.distributed_c10d._DistributedBackendOptions, _: object) -> SparkdlProcessGroup:
        return kind(
            communicator,
            options.store,
            communicator.rendezvous,
            timeout_s=timeout_s,
            owns_communicator=False,
            base_store=store,
            accelerator=accelerator,
        )

    dist.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=store, rank=communicator.rank, world_size=communicator.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
