"""The choice of the backend for tensors on GPUs: NCCL, torch's or sparkdl's own, or a way through host memory.

The ranks exchange which GPU they have, as NCCL needs one for each:

* ``"auto"``: torch's NCCL if every rank has a GPU of its own, host memory if ranks share one, and no backend if some
  rank has none: CUDA tensors are then refused.
* ``"torch"``: torch's ``ProcessGroupNCCL``, which torch's own users rely on, in a :class:`TorchAccelerator`.
* ``"sparkdl"``: :class:`~sparkdl.torch.gpu.nccl.NcclAccelerator`, whose failures name the rank and reach all ranks.
  It becomes the choice of ``"auto"`` once it is measured to be as fast on machines with several GPUs. ``hvd`` takes it.
* ``"hierarchical"``: :class:`~sparkdl.torch.gpu.hierarchical.HierarchicalAccelerator`, NCCL inside each host and the
  communicator's own transport across hosts. ``"auto"`` chooses it if the communicator's ``transport`` asks for it. If
  all ranks are on one host, torch's NCCL is used instead.
* ``"host"``: :class:`~sparkdl.torch.gpu.staged.StagedAccelerator`.

A backend that is asked for by name but not available is an error, never replaced by another one. ``"sparkdl"`` and
``"hierarchical"`` are available to ranks that share a GPU, too, where NCCL is told to take them
(:func:`~sparkdl.collective.nccl.opening.may_share_gpus`).
"""

from __future__ import annotations

import json
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sparkdl.collective import Communicator, Rendezvous, all_gather_bytes
from sparkdl.collective.nccl.hierarchy import open_hierarchy
from sparkdl.collective.nccl.opening import (
    find_shared_gpus,
    may_share_gpus,
    open_nccl_group,
    shared_gpus_error,
)
from sparkdl.errors import ParamError
from sparkdl.topology import name_ranks
from sparkdl.torch.gpu.hierarchical import HierarchicalAccelerator
from sparkdl.torch.gpu.lanes import GpuLane
from sparkdl.torch.gpu.nccl import NcclAccelerator
from sparkdl.torch.gpu.staged import StagedAccelerator
from sparkdl.torch.process_group import SparkdlProcessGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.torch.submission import Accelerator

logger = logging.getLogger(__name__)

CUDA_BACKENDS = ("auto", "torch", "sparkdl", "hierarchical", "host")


class TorchAccelerator:
    """The accelerator that is a c10d group of torch's own, whose methods are called as they are.

    Args:
        group: group with one backend.
    """

    failure = None
    """torch's works raise the errors themselves."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def drop_coalesced(self, device: torch.device) -> None:
        """End coalesced operations after an error; torch has no way to forget them, so it starts them."""
        self._group._end_coalescing(device)


def agree_on_backend(
    backend: str, communicator: Communicator, rendezvous: Rendezvous, timeout_s: float, *, own: bool = False
) -> str | None:
    """Agree on the backend of CUDA tensors; None if ``"auto"`` finds a rank without a GPU. Collective.

    Args:
        backend: one of ``CUDA_BACKENDS``.
        communicator: communicator of the ranks.
        rendezvous: rendezvous whose keys only this choice uses.
        timeout_s: longest wait for the other ranks, in seconds.
        own: whether ``"auto"`` means sparkdl's own NCCL where it can be opened.

    Raises:
        ParamError: on every rank, if the backend is not available, or ranks asked for different backends.
    """
    texts = all_gather_bytes(
        rendezvous,
        key="gpu",
        rank=communicator.rank,
        world_size=communicator.world_size,
        value=json.dumps({"backend": backend, "gpu": _own_gpu(), "may_share": may_share_gpus()}).encode(),
        timeout_s=timeout_s,
    )
    ranks = [json.loads(text) for text in texts]
    may_share = all(rank["may_share"] for rank in ranks)
    chosen = choose_cuda_backend(
        [rank["backend"] for rank in ranks],
        [rank["gpu"] for rank in ranks],
        is_hierarchical=communicator.requested_transport.startswith("hierarchical"),
        num_hosts=communicator.topology.num_hosts,
        may_share=may_share,
    )
    if chosen is None:
        return None
    if own and (chosen == "torch" or (chosen == "host" and may_share)):
        chosen = "sparkdl"
    if backend == "auto" and chosen == "host" and communicator.rank == 0:
        logger.warning(
            "Ranks share a GPU: CUDA tensors travel through host memory.%s",
            " cuda='sparkdl' uses NCCL between them." if may_share else "",
        )
    if communicator.rank == 0:
        warn_of_wire(chosen, communicator.wire, communicator.topology.num_hosts)
    return chosen


def open_chosen(
    chosen: str, communicator: Communicator, rendezvous: Rendezvous, store: Store, timeout_s: float
) -> Accelerator:
    """Open the backend that :func:`agree_on_backend` has chosen, over the same ranks. Collective.

    Args:
        chosen: the choice.
        communicator: communicator of the ranks.
        rendezvous: rendezvous whose keys only this group uses.
        store: c10d store of the group.
        timeout_s: default deadline of a collective, in seconds.
    """
    if chosen == "torch":
        return _torch_nccl(communicator, store, timeout_s)
    device = torch.device("cuda", torch.cuda.current_device())
    if chosen == "sparkdl":
        group = open_nccl_group(communicator, gpu=device.index, timeout_s=timeout_s)
        return NcclAccelerator(group, GpuLane(device), timeout_s=timeout_s)
    if chosen == "hierarchical":
        return open_hierarchical(
            communicator, rendezvous, store, GpuLane(device), timeout_s, gpu=device.index
        )
    return open_staged(communicator, rendezvous, store, GpuLane(device), timeout_s)


def choose_cuda_backend(
    backends: Sequence[str],
    gpus: Sequence[str],
    *,
    is_hierarchical: bool = False,
    num_hosts: int = 1,
    may_share: bool = False,
) -> str | None:
    """Choose the backend that the ranks use; None for no backend.

    Args:
        backends: backend that each rank asked for.
        gpus: identity of each rank's GPU; empty for a rank without one.
        is_hierarchical: whether the communicator's transport asks for NCCL only inside hosts.
        num_hosts: number of hosts that the ranks are on.
        may_share: whether NCCL may be opened over ranks that share a GPU, if sparkdl opens it.

    Raises:
        ParamError: if the backend is not available, or ranks asked for different backends.
    """
    if len(set(backends)) > 1:
        raise ParamError(f"all ranks must ask for the same cuda=, but they ask for {list(backends)}")
    backend = backends[0]
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    if without:
        if backend == "auto":
            return None
        raise ParamError(
            f"cuda={backend!r} needs a GPU on every rank, but {name_ranks(without)} cannot see one"
        )
    shared = find_shared_gpus(gpus)
    if backend == "auto" and is_hierarchical:
        backend = "hierarchical"
    if backend == "auto":
        return "host" if shared else "torch"
    opens_nccl = backend == "sparkdl" or (backend == "hierarchical" and num_hosts > 1)
    if shared and backend != "host" and not (may_share and opens_nccl):
        named = {f"GPU {gpu}": ranks for gpu, ranks in shared.items()}
        raise shared_gpus_error(named, f"cuda={backend!r}", "use cuda='host'.")
    if backend == "hierarchical" and num_hosts == 1:
        return "torch"
    return backend


def warn_of_wire(backend: str, wire: str, num_hosts: int) -> None:
    """Warn if ``wire`` asks for rounding between hosts, but NCCL, which does not round, sends between them."""
    if backend in ("torch", "sparkdl") and num_hosts > 1 and wire != "float32":
        logger.warning(
            "wire=%r does not reach CUDA tensors: they travel by NCCL, which sends float32 as it is. "
            "transport='hierarchical' rounds it between hosts.",
            wire,
        )


def open_staged(
    communicator: Communicator, rendezvous: Rendezvous, store: Store, lane: GpuLane, timeout_s: float
) -> StagedAccelerator:
    """Open the backend that goes through host memory."""
    host_group = _host_group(communicator, rendezvous, store, timeout_s)
    return StagedAccelerator(host_group, lane, communicator.name)


def open_hierarchical(
    communicator: Communicator,
    rendezvous: Rendezvous,
    store: Store,
    lane: GpuLane,
    timeout_s: float,
    *,
    gpu: int,
) -> HierarchicalAccelerator:
    """Open the backend with NCCL inside each host and process sets across hosts."""
    host_group = _host_group(communicator, rendezvous, store, timeout_s)
    try:
        hierarchy = open_hierarchy(host_group.communicator, gpu=gpu, timeout_s=timeout_s)
    except BaseException:
        host_group.shutdown()
        raise
    return HierarchicalAccelerator(hierarchy, host_group, lane, timeout_s=timeout_s)


def _host_group(
    communicator: Communicator, rendezvous: Rendezvous, store: Store, timeout_s: float
) -> SparkdlProcessGroup:
    """A group for CPU tensors over a process set of all ranks that is used for nothing else."""
    staging = communicator.split(range(communicator.world_size), "staging")
    return SparkdlProcessGroup(
        staging, store, rendezvous, timeout_s=timeout_s, owns_communicator=True, accelerator=None
    )


def _torch_nccl(communicator: Communicator, store: Store, timeout_s: float) -> TorchAccelerator:
    if not dist.is_nccl_available():
        raise ParamError(f"torch {torch.__version__} was built without NCCL; use cuda='sparkdl'")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    rank, world_size = communicator.rank, communicator.world_size
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    return TorchAccelerator(group)


def _own_gpu() -> str:
    """The UUID of this rank's current GPU; empty if it has none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
