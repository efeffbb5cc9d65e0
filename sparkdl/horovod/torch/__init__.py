"""``import sparkdl.horovod.torch as hvd``: the first part of ``horovod.torch`` (0.28), on sparkdl's communicators.

Runs on the *rank*; :func:`sparkdl.launch.run_on_ranks` starts ranks. Names, defaults and error messages are
Horovod's. One thing differs: operations are matched by the order in which a rank submits them, not by ``name``, so
all ranks must submit them in the same order. ``DistributedOptimizer`` sees to that for gradients.
"""

from __future__ import annotations

from sparkdl.horovod.torch.compression import Compression
from sparkdl.horovod.torch.operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    poll,
    synchronize,
)
from sparkdl.horovod.torch.optimizer import DistributedOptimizer
from sparkdl.horovod.torch.process import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from sparkdl.horovod.torch.reduce_ops import Average, Max, Min, Product, Sum
from sparkdl.horovod.torch.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
