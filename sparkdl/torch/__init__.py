"""The c10d backend ``"sparkdl"``: torch.distributed over the communicators of :mod:`sparkdl.collective`.

Runs on the *rank*. Begin with ``registration`` and ``process_group``. Importing this module registers the backend, and
makes torch's ``env://`` find the ranks of sparkdl's launchers; :func:`init_process_group` starts torch.distributed
over an open communicator. ``DistributedDataParallel``, FSDP2, ``DeviceMesh``, DTensor and distributed checkpoints then
run on it unchanged. The module starts no processes and has no training loop.
"""

from __future__ import annotations

from sparkdl.collective.current import finders
from sparkdl.slow_links import DiLoCo, LocalSGD, PowerSGD, TopK
from sparkdl.torch.data_parallel import DataParallel
from sparkdl.torch.local_updates import LocalUpdates
from sparkdl.torch.process_group import BACKEND_NAME, SparkdlProcessGroup, collective_errors
from sparkdl.torch.registration import (
    RendezvousStore,
    StoreRendezvous,
    destroy_process_group,
    find_torchrun,
    init_process_group,
    register,
)
from sparkdl.torch.replicas import ReplicaCheck
from sparkdl.torch.sync_batch_norm import CrossRankBatchNorm, synchronized_batch_norms

__all__ = [
    "BACKEND_NAME",
    "CrossRankBatchNorm",
    "DataParallel",
    "DiLoCo",
    "LocalSGD",
    "LocalUpdates",
    "PowerSGD",
    "RendezvousStore",
    "ReplicaCheck",
    "SparkdlProcessGroup",
    "StoreRendezvous",
    "TopK",
    "collective_errors",
    "destroy_process_group",
    "init_process_group",
    "synchronized_batch_norms",
]

register()
finders.append(find_torchrun)
