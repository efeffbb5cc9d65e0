"""How torch.distributed comes to use sparkdl: the backend's registration, and the default group.

Runs on the *rank*. Importing :mod:`sparkdl.torch` registers the backend, so that
``init_process_group("sparkdl", ...)`` and ``new_group(backend="sparkdl")`` work as with any other; in ranks of our
launchers :mod:`sparkdl.autoload` registers it as soon as torch is imported.
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
    provided_communicator,
)
from sparkdl.collective.deadline import to_seconds
from sparkdl.errors import ParamError
from sparkdl.torch.accelerator import CUDA_ROADS, open_accelerator
from sparkdl.torch.process_group import BACKEND_NAME, SparkdlProcessGroup
from sparkdl.torch.store import RendezvousStore, StoreRendezvous
from sparkdl.torch.torchrun import job_of

DEFAULT_TIMEOUT_S = 300.0

# The communicator that the default group is being made over; torch hands plug-in backends no argument of
# their own.
_given: list[tuple[Communicator, Rendezvous, RendezvousStore]] = []

_num_inits: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()

# What worlds were asked to serve CUDA tensors by, and their process sets with them; None to leave CUDA alone.
_cuda_roads: WeakKeyDictionary[Communicator, str | None] = WeakKeyDictionary()


def register() -> None:
    """Make the backend ``"sparkdl"`` known to torch.distributed. Doing it again changes nothing."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND_NAME, create_process_group, extended_api=True, devices=["cpu", "cuda"]
        )


def init_process_group(
    communicator: Communicator | None = None, *, timeout_s: float | None = None, cuda: bool | str = True
) -> None:
    """Initialize torch.distributed over an open communicator, whose rendezvous also becomes c10d's store.

    CPU tensors travel over the communicator; CUDA tensors over NCCL where every rank has a GPU of its own, and
    through host memory where ranks share one. The communicator stays the caller's: :func:`destroy_process_group`
    leaves it open.

    Args:
        communicator: the world; every rank of it makes this call. When None, that of the job which this process is
            a rank of, as ``sparkdl run``, ``mpiexec`` or ``torchrun`` started it.
        timeout_s: deadline of a collective that names none, 300 s by default.
        cuda: whether CUDA tensors are to travel, too, or by what: ``"auto"``, which True stands for, ``"torch"``,
            ``"sparkdl"``, ``"hierarchical"`` or ``"host"``; see :mod:`sparkdl.torch.accelerator`. Finding out a rank's
            GPU initializes CUDA there and takes hundreds of MiB of its memory; False leaves the GPUs alone. The same on
            every rank.

    Raises:
        ParamError: if torch.distributed is initialized already, ``cuda`` cannot be had, or no communicator is given
            and none is found.
    """
    road = ("auto" if cuda else None) if isinstance(cuda, bool) else cuda
    if road is not None and road not in CUDA_ROADS:
        raise ParamError(f"cuda={cuda!r} is unknown; it may be a bool or one of {', '.join(CUDA_ROADS)}")
    if dist.is_initialized():
        raise ParamError("torch.distributed is initialized already; call destroy_process_group() first.")
    communicator = communicator or current_communicator()
    if communicator is None:
        raise ParamError(
            "init_process_group found no communicator: this process was not started as a rank. Pass one, or start the"
            " script by `sparkdl run`, mpiexec or torchrun."
        )
    register()
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    rendezvous = _fresh_keys(communicator)
    store = RendezvousStore(rendezvous, timeout_s=timeout_s)
    _cuda_roads[communicator] = road
    _given.append((communicator, rendezvous, store))
    try:
        dist.init_process_group(
            BACKEND_NAME,
            store=store,
            rank=communicator.rank,
            world_size=communicator.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    finally:
        _given.clear()


def destroy_process_group() -> None:
    """End torch.distributed on this rank and close what its process sets opened; idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def create_process_group(options: Any, _: object) -> SparkdlProcessGroup:
    """What torch calls to make a group; ``options`` is c10d's ``DistributedBackendOptions``."""
    timeout = options.timeout
    timeout_s = to_seconds(timeout) if isinstance(timeout, timedelta) else float(timeout)
    given = _given.pop() if _given else None
    base_store, owns_communicator = None, False
    if given is not None:
        communicator, rendezvous, base_store = given
    elif _is_whole_job(options):
        of_job = current_communicator()
        assert of_job is not None, "a rank of a job has one"
        communicator, rendezvous = of_job, _fresh_keys(of_job)
    else:
        rendezvous, owns_communicator = _group_rendezvous(options), True
        communicator = _open(options, rendezvous, timeout_s)
    road = _cuda_road(communicator)
    accelerator = (
        None if road is None else open_accelerator(road, communicator, rendezvous, options.store, timeout_s)
    )
    return SparkdlProcessGroup(
        communicator,
        options.store,
        rendezvous,
        timeout_s=timeout_s,
        owns_communicator=owns_communicator,
        base_store=base_store,
        accelerator=accelerator,
    )


def _is_whole_job(options: Any) -> bool:
    """Whether a default group that ``env://`` made has the ranks of this process's job, and by their numbers."""
    job = job_of(options.store)
    is_default = not options.global_ranks_in_group
    return (
        job is not None
        and is_default
        and (options.group_rank, options.group_size) == (job.rank, job.world_size)
    )


def _group_rendezvous(options: Any) -> Rendezvous:
    """The keys of a group that was given no communicator: below the world's, or in the store that torch brought."""
    world = _world()
    if world is None:
        return StoreRendezvous(options.store, "sparkdl/")
    ranks = "-".join(map(str, options.global_ranks_in_group))
    return PrefixRendezvous(world.rendezvous, f"group/{options.group_id}/{ranks}")


def _open(options: Any, rendezvous: Rendezvous, timeout_s: float) -> Communicator:
    world = _world()
    parent = world.communicator if world is not None else provided_communicator()
    rank = options.group_rank
    if parent is not None:
        secret, transport, wire = parent.secret, parent.requested_transport, parent.wire
    elif (job := job_of(options.store)) is not None:
        secret, transport, wire = job.secret, job.transport, job.wire
    else:
        secret, transport, wire = _shared_secret(rendezvous, rank, timeout_s), "auto", "float32"
    return open_communicator(
        rendezvous=rendezvous,
        rank=rank,
        world_size=options.group_size,
        secret=secret,
        transport=transport,
        wire=wire,
        timeout_s=timeout_s,
        name=f"group {options.group_id}",
        host_of_rank=world.communicator.hosts_of(options.global_ranks_in_group)
        if world is not None
        else None,
        # A group is a process set of the communicator below: measured and watched together with it.
        stall_check=parent.stall_check if parent is not None else None,
        telemetry=parent.telemetry if parent is not None else None,
        world_ranks=options.global_ranks_in_group or None,  # none for the default group
    )


def _world() -> SparkdlProcessGroup | None:
    """The default group, if it is ours."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return group if isinstance(group, SparkdlProcessGroup) else None


def _cuda_road(communicator: Communicator) -> str | None:
    """By what the default group that this communicator makes or belongs to was asked to serve CUDA tensors."""
    world = _world()
    return _cuda_roads.get(communicator if world is None else world.communicator, "auto")


def _fresh_keys(communicator: Communicator) -> Rendezvous:
    """A part of the communicator's rendezvous that no earlier default group over it has used.

    torch numbers its groups from zero again after ``destroy_process_group``.
    """
    _num_inits[communicator] = _num_inits.get(communicator, 0) + 1
    return PrefixRendezvous(communicator.rendezvous, f"torch/{communicator.name}/{_num_inits[communicator]}")


def _shared_secret(rendezvous: Rendezvous, rank: int, timeout_s: float) -> bytes:
    """A secret that the group's first rank makes and the store spreads: as safe as the user's store."""
    if rank == 0:
        rendezvous.set("secret", new_secret())
    return rendezvous.get("secret", timeout_s)
