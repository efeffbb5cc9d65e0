"""How torch.distributed comes to use sparkdl: the backend's registration, and the default group.

Runs on the *rank*. Importing :mod:`sparkdl.torch` registers the backend, so that
``init_process_group("sparkdl", ...)``
and ``new_group(backend="sparkdl")`` work as with any other.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from sparkdl.collective import (
    Communicator,
    PrefixRendezvous,
    Rendezvous,
    current_communicator,
    new_secret,
    open_communicator,
)
from sparkdl.errors import ParamError
from sparkdl.torch.accelerator import nccl_group
from sparkdl.torch.process_group import BACKEND_NAME, SparkdlProcessGroup
from sparkdl.torch.store import RendezvousStore, StoreRendezvous

DEFAULT_TIMEOUT_S = 300.0

# The communicator that the default group is being made over; torch hands plug-in backends no argument of
# their own.
_given: list[Communicator] = []

_num_inits: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()


def register() -> None:
    """Make the backend ``"sparkdl"`` known to torch.distributed. Doing it again changes nothing."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def init_process_group(communicator: Communicator, *, timeout_s: float | None = None) -> None:
    """Initialize torch.distributed over an open communicator, whose rendezvous also becomes c10d's store.

    CPU tensors travel over the communicator; CUDA tensors over NCCL, where every rank has a GPU of its own.
    The communicator stays the caller's: :func:`destroy_process_group` leaves it open.

    Args:
        communicator: the world; every rank of it makes this call.
        timeout_s: deadline of a collective that names none, 300 s by default.

    Raises:
        ParamError: if torch.distributed is initialized already.
    """
    if dist.is_initialized():
        raise ParamError("torch.distributed is initialized already; call destroy_process_group() first.")
    register()
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    _given.append(communicator)
    try:
        dist.init_process_group(
            BACKEND_NAME,
            store=RendezvousStore(_fresh_keys(communicator), timeout_s=timeout_s),
            rank=communicator.rank,
            world_size=communicator.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    finally:
        _given.clear()


def destroy_process_group() -> None:
    """End torch.distributed on this rank and close what its sub-groups opened; idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _create(options: Any, _: object) -> SparkdlProcessGroup:
    """What torch calls to make a group; ``options`` is c10d's ``DistributedBackendOptions``."""
    timeout = options.timeout
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    given = _given.pop() if _given else None
    communicator = given or _open(options, timeout_s)
    return SparkdlProcessGroup(
        communicator,
        options.store,
        timeout_s=timeout_s,
        owns_communicator=given is None,
        accelerator=nccl_group(communicator, options.store, timeout_s),
    )


def _open(options: Any, timeout_s: float) -> Communicator:
    """Open the communicator of a group that was given none, over the group's own store."""
    rendezvous = StoreRendezvous(options.store, "sparkdl/")
    parent = _world_communicator() or current_communicator()
    rank, world_size = options.group_rank, options.group_size
    return open_communicator(
        rendezvous=rendezvous,
        rank=rank,
        world_size=world_size,
        secret=parent.secret if parent is not None else _shared_secret(rendezvous, rank, timeout_s),
        transport=parent.transport if parent is not None else "auto",
        timeout_s=timeout_s,
        name=options.group_id,
    )


def _fresh_keys(communicator: Communicator) -> Rendezvous:
    """A part of the communicator's rendezvous that no earlier default group over it has used.

    torch numbers its groups from zero again after ``destroy_process_group``.
    """
    _num_inits[communicator] = _num_inits.get(communicator, 0) + 1
    return PrefixRendezvous(communicator.rendezvous, f"torch/{communicator.name}/{_num_inits[communicator]}")


def _world_communicator() -> Communicator | None:
    group = dist.group.WORLD if dist.is_initialized() else None
    return group.communicator if isinstance(group, SparkdlProcessGroup) else None


def _shared_secret(rendezvous: StoreRendezvous, rank: int, timeout_s: float) -> bytes:
    """A secret that the group's first rank makes and the store spreads: as safe as the user's store."""
    if rank == 0:
        rendezvous.set("secret", new_secret())
    return rendezvous.get("secret", timeout_s)
