"""``import sparkdl.horovod.torch as hvd``: a drop-in for ``horovod.torch`` 0.28.1, on sparkdl's communicators.

Runs on the *rank*; :func:`sparkdl.launch.run_on_ranks` starts ranks. Begin with ``basics`` and ``optimizer``. Names,
defaults and error messages are Horovod's. What differs:

- No operation waits for ever: one that some rank does not take part in fails at the communicator's deadline.
- Tensors need not be contiguous, and may be bfloat16 or of any integer type.
- Process sets can be added at run time without ``HOROVOD_DYNAMIC_PROCESS_SETS``.
- CUDA tensors go to NCCL; what it cannot compute, such as Adasum, goes through host memory.
"""

from __future__ import annotations

from sparkdl.horovod.torch import elastic
from sparkdl.horovod.torch.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from sparkdl.horovod.torch.compression import Compression
from sparkdl.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from sparkdl.horovod.torch.handles import poll, synchronize
from sparkdl.horovod.torch.names import (
    Adasum,
    Average,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    Max,
    Min,
    Product,
    Sum,
)
from sparkdl.horovod.torch.operations.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from sparkdl.horovod.torch.operations.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from sparkdl.horovod.torch.operations.alltoall import alltoall, alltoall_async
from sparkdl.horovod.torch.operations.barrier_and_join import barrier, join
from sparkdl.horovod.torch.operations.broadcast import (
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from sparkdl.horovod.torch.operations.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from sparkdl.horovod.torch.optimizer import DistributedOptimizer
from sparkdl.horovod.torch.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_of,
    remove_process_set,
)
from sparkdl.horovod.torch.sync_batch_norm import SyncBatchNorm
from sparkdl.monitor.communication import compute_throughput, monitor_communication
from sparkdl.monitor.memory import get_gpu_memory_stats

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "compute_throughput",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_gpu_memory_stats",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "monitor_communication",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_of",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

# At the end, as it re-exports the names above.
from sparkdl.horovod.torch import mpi_ops  # noqa: F401  # Horovod's users find it as `hvd.mpi_ops`
