"""The c10d backend ``"sparkdl"``: torch.distributed over the communicators of :mod:`sparkdl.collective`.

Runs on the *rank*. Importing this module registers the backend, and has torch's ``env://`` find the ranks of our
launchers; :func:`init_process_group` starts torch.distributed over a communicator that is open already.
``DistributedDataParallel``, FSDP2, ``DeviceMesh``, DTensor and distributed checkpoints then run on it unchanged. It
starts no process and knows no training loop.
"""

from __future__ import annotations

from sparkdl.collective.current import add_finder
from sparkdl.torch.data_parallel import DataParallel
from sparkdl.torch.process_group import BACKEND_NAME, SparkdlProcessGroup, collective_errors
from sparkdl.torch.registration import (
    RendezvousStore,
    StoreRendezvous,
    destroy_process_group,
    find_torchrun,
    init_process_group,
    register,
    register_rendezvous,
)
from sparkdl.torch.sync_batch_norm import SyncBatchNorm, synchronized_batch_norms

__all__ = [
    "BACKEND_NAME",
    "DataParallel",
    "RendezvousStore",
    "SparkdlProcessGroup",
    "StoreRendezvous",
    "SyncBatchNorm",
    "collective_errors",
    "destroy_process_group",
    "init_process_group",
    "synchronized_batch_norms",
]

register()
register_rendezvous()
add_finder(find_torchrun)
