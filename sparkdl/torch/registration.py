"""Registration of the backend with torch.distributed, the stores of its rendezvous, and the default group.

``RendezvousStore`` lets torch.distributed keep its keys at sparkdl's coordinator, which authenticates its clients, so
that no ``TCPStore`` listens. ``StoreRendezvous`` opens communicators over a store that torch already has: the store of
a process set, or the one given to ``init_process_group("sparkdl", ...)``.

Ranks can find each other by the environment variables of ``torchrun``. Ranks of ``torchrun``, or of any other launcher
that sets its variables, exchange the job's secret through torch's store: the secret is as safe as that store. Ranks of
sparkdl's launchers have the same variables. For them torch's ``env://``, and ``tcp://`` with the same address, return
a store whose keys are at sparkdl's coordinator, which serves only holders of the job's secret.

Importing :mod:`sparkdl.torch` registers the backend, so that ``init_process_group("sparkdl", ...)`` and
``new_group(backend="sparkdl")`` work as with any other; in ranks of sparkdl's launchers :mod:`sparkdl.autoload`
registers it as soon as torch is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import (
    _env_rendezvous_handler,
    _file_rendezvous_handler,
    _tcp_rendezvous_handler,
    rendezvous,
)

from sparkdl.collective import (
    Communicator,
    Deadline,
    Rendezvous,
    current_communicator,
    new_secret,
    open_communicator,
    provided_communicator,
)
from sparkdl.collective.current import communicator_for, current_job, find_mpi_world, job_rendezvous
from sparkdl.collective.job import find_all, host_job
from sparkdl.collective.torchrun_variables import is_own_run, is_torchruns
from sparkdl.errors import ParamError, SparkdlError
from sparkdl.patches.late_parameters import average_late_parameters
from sparkdl.patches.mesh_caches import forget_meshes
from sparkdl.patches.rendezvous_handlers import replace_handlers
from sparkdl.rendezvous.addresses import (
    LOOPBACK,
    hosts_of_name,
    is_loopback,
    reachable_hosts,
    resolve,
    route_host,
)
from sparkdl.rendezvous.deadline import to_seconds
from sparkdl.rendezvous.store import all_gather_bytes
from sparkdl.torch.averaging import average_gradients_of
from sparkdl.torch.gpu.accelerator import CUDA_BACKENDS, agree_on_backend, open_chosen
from sparkdl.torch.process_group import BACKEND_NAME, SparkdlProcessGroup
from sparkdl.torch.replicas import LiveParameters

if TYPE_CHECKING:
    from sparkdl.collective.job import RankJob


_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
"""Pauses between two polls for a key: short at first, then longer."""


class RendezvousStore(Store):
    """A c10d store whose keys are in a rendezvous. Values are bytes; ``str`` values are encoded as UTF-8.

    C++ keeps only its half of a store: a caller that passes one to torch must keep the Python object, too.

    Args:
        rendezvous: rendezvous with the keys.
        timeout_s: seconds that ``get`` and ``wait`` wait for a key, unless they are given a timeout.
    """

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        # Kept in the C++ half, where stores around this one read and change it.
        self.set_timeout(timedelta(seconds=timeout_s))

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._rendezvous.set(key, _encode(value))

    def get(self, key: str) -> bytes:
        """The value of a key, waiting until it is set."""
        return self._rendezvous.get(key, to_seconds(self.timeout))  # type: ignore[attr-defined]  # not in the stub

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at zero, and return its new value."""
        return self._rendezvous.add(key, value)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Set a key if it holds ``expected_value``, or is unset and ``expected_value`` is empty; return its value."""
        return self._rendezvous.compare_set(key, _encode(expected_value), _encode(desired_value))

    def delete_key(self, key: str) -> bool:
        """Delete a key; True if there was one."""
        return self._rendezvous.delete(key)

    def num_keys(self) -> int:
        """Number of keys."""
        return self._rendezvous.num_keys()

    def check(self, keys: list[str]) -> bool:
        """Whether all of the keys are set."""
        return self._rendezvous.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of the keys are set."""
        timeout_s = to_seconds(timeout or self.timeout)  # type: ignore[attr-defined]  # likewise
        for key in keys:
            self._rendezvous.get(key, timeout_s)

    def has_extended_api(self) -> bool:
        """Return False: ``append``, ``multi_get`` and ``multi_set`` are missing, and torch does not need them."""
        return False

    def clone(self) -> RendezvousStore:
        """Return this store, which another thread may use, too: a rendezvous serves any thread."""
        return self

    # The names of two of the methods in C++.
    deleteKey = delete_key  # noqa: N815 - C++ names
    getNumKeys = num_keys  # noqa: N815 - likewise


class StoreRendezvous(Rendezvous):
    """A rendezvous whose keys are in a c10d store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._store.set(self._prefix + key, value)  # type: ignore[arg-type]  # bytes are accepted

    def _wait_for(self, key: str, timeout_s: float) -> bytes | None:
        # Polled instead of the store's own `wait`: a TCPStore serves one caller at a time, and communicators wait on
        # their own threads while other threads set keys.
        deadline = Deadline(timeout_s)
        pause_s = _FIRST_PAUSE_S
        while not self._store.check([self._prefix + key]):
            if deadline.remaining_s() <= 0:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return bytes(self._store.get(self._prefix + key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at zero, and return its new value."""
        return int(self._store.add(self._prefix + key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if it holds ``expected``, or is unset and ``expected`` is empty; return its value."""
        return bytes(self._store.compare_set(self._prefix + key, expected, desired))  # type: ignore[arg-type]  # ditto

    def delete(self, key: str) -> bool:
        """Delete a key; True if there was one."""
        return bool(self._store.delete_key(self._prefix + key))

    def hosts_here(self) -> tuple[str, ...]:
        """See the contract; known only for a ``TCPStore``, whose host all ranks reach."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return ()
        if hosts := hosts_of_name(store.host):
            return hosts
        return tuple(
            host
            for there in resolve(store.host)
            if not is_loopback(there) and (host := route_host(there)) is not None
        )

    def _are_set(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))


def _encode(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_TORCHS_HANDLERS = {
    "env": _env_rendezvous_handler,
    "tcp": _tcp_rendezvous_handler,
    "file": _file_rendezvous_handler,
}
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEET_TIMEOUT = timedelta(seconds=300)
_KEY = "sparkdl/invitation"

# Keeps the stores alive: that of rank 0 serves the other ranks.
_stores: list[Store] = []

has_met = Event()
"""Whether this rank has run a rendezvous of torch.distributed with other ranks."""


class JobStore(RendezvousStore):
    """The store that ``env://``, or ``tcp://`` with the coordinator's address, returns in a rank of a sparkdl launcher.

    Attributes:
        job: job whose coordinator has the keys.
    """

    def __init__(self, job: RankJob, rank: int, world_size: int, *, timeout_s: float) -> None:
        store = job_rendezvous(job)
        # torch numbers its groups from zero again after destroy_process_group; the ranks initialize equally often.
        count = store.add(f"torchrun/stores/{rank}/{world_size}", 1)
        super().__init__(store.view(f"torchrun/{world_size}/{count}"), timeout_s=timeout_s)
        self.job = job


def find_torchrun(environ: Mapping[str, str]) -> Callable[[], Communicator] | None:
    """A function that opens the communicator of the ranks that ``torchrun`` started; None if it did not start this one.

    Raises:
        LaunchError: if some of the variables that ``torchrun`` sets are missing.
    """
    if is_own_run(environ):
        return None  # a rank of sparkdl finds its own job; a process that a rank of a Runner has started is not a rank
    if not is_torchruns(environ) and find_mpi_world(environ) is not None:
        return None  # scripts for mpiexec set some of these for torch
    variables = find_all(environ, _VARIABLES, "Start ranks by torchrun, which sets all of them.")
    return None if variables is None else partial(_open_for_job, environ)


def meet(url: str, timeout: timedelta = _MEET_TIMEOUT, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
    """Handle torch's ``env://``, ``tcp://`` and ``file://``: a :class:`JobStore` if the address is our coordinator's.

    The address of ``env://`` is ``MASTER_ADDR`` and ``MASTER_PORT``. For any other address, also one that a program has
    set, use torch's own handler.
    """
    job, parts = current_job(), urlparse(url)
    host: str | None = parts.hostname
    port: str | int | None = parts.port
    named, is_env = dict(parse_qsl(parts.query)), parts.scheme == "env"
    if is_env:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        named = {
            name: value for name in ("rank", "world_size") if (value := os.environ.get(name.upper()))
        } | named
    is_numbered = is_env or {"rank", "world_size"} <= named.keys()
    if job is None or not job.is_at(host, port) or not is_numbered:
        _note_elsewhere(job, named.get("world_size"))
        yield from _TORCHS_HANDLERS[parts.scheme](url, timeout=timeout, **kwargs)
        return
    rank, world_size = int(named.get("rank", job.rank)), int(named.get("world_size", job.world_size))
    yield _job_store(job, rank, world_size, timeout), rank, world_size


def _job_store(job: RankJob, rank: int, world_size: int, timeout: timedelta) -> Store:
    if world_size == 1 < job.world_size:
        return HashStore()  # this rank meets no other
    has_met.set()
    store = JobStore(job, rank, world_size, timeout_s=to_seconds(timeout))
    _stores.append(store)  # C++ keeps only its half
    return store


def job_of(store: Any) -> RankJob | None:
    """The job whose coordinator has the keys of a store; None if there is no such job."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.job if isinstance(store, JobStore) else None


def _note_elsewhere(job: RankJob | None, world_size: int | str | None) -> None:
    """Report to the launcher, if there is one, that ranks meet at an address that the program has chosen.

    A rank that makes a world of its own meets no other.
    """
    if job is None or str(world_size) == "1":
        return
    has_met.set()
    if is_own_run(os.environ):
        with suppress(SparkdlError, ConnectionError):  # the ranks now meet without our coordinator
            job_rendezvous(job)


def _open_for_job(environ: Mapping[str, str]) -> Communicator:
    store, rank, world_size = next(iter(rendezvous("env://", timeout=_MEET_TIMEOUT)))
    _stores.append(store)

    def broadcast(invitation: bytes) -> bytes:
        if rank == 0:
            store.set(_KEY, invitation)
        return bytes(store.get(_KEY))

    return host_job(rank, world_size, broadcast, environ, host=_where_rank_0_is_reached(environ, world_size))


def _where_rank_0_is_reached(environ: Mapping[str, str], world_size: int) -> Sequence[str]:
    """The addresses of rank 0's machine at which the other ranks reach its coordinator; only rank 0 uses them."""
    if environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        return [LOOPBACK]
    # The other ranks reach the store there, too.
    return reachable_hosts(hosts_of_name(environ["MASTER_ADDR"]))


DEFAULT_TIMEOUT_S = 300.0

# The communicator of the default group that is being created; torch passes no further arguments to plug-in
# backends.
_given: list[tuple[Communicator, Rendezvous, RendezvousStore]] = []

_num_inits: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()

# The CUDA backend that was asked for, by world; also for its process sets. None to leave CUDA alone.
_cuda_backends: WeakKeyDictionary[Communicator, str | None] = WeakKeyDictionary()


def register() -> None:
    """Register the backend ``"sparkdl"`` and :func:`meet` with torch.distributed. Idempotent."""
    replace_handlers(meet)
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND_NAME, create_process_group, extended_api=True, devices=["cpu", "cuda"]
        )
    average_late_parameters(BACKEND_NAME, LiveParameters, average_gradients_of)


def init_process_group(
    communicator: Communicator | None = None, *, timeout_s: float | None = None, cuda: bool | str = True
) -> None:
    """Initialize torch.distributed over an open communicator, whose rendezvous also becomes c10d's store.

    CPU tensors travel over the communicator; CUDA tensors over NCCL if every rank has a GPU of its own, and through
    host memory if ranks share one. :func:`destroy_process_group` leaves the communicator open; the caller closes it.

    Args:
        communicator: communicator of the world; every rank makes this call. None for the communicator of the
            job that this process is a rank of, as started by ``sparkdl run``, ``mpiexec`` or ``torchrun``.
        timeout_s: default deadline of a collective, in seconds; None for 300 s.
        cuda: backend of CUDA tensors: ``"auto"`` or True, ``"torch"``, ``"sparkdl"``, ``"hierarchical"`` or ``"host"``;
            see :mod:`sparkdl.torch.gpu.accelerator`. False to refuse CUDA tensors and leave the GPUs alone: identifying
            a rank's GPU initializes CUDA there and takes hundreds of MiB of its memory. The same on every rank.

    Raises:
        ParamError: if torch.distributed is initialized already, or the backend of ``cuda`` is unknown or not available.
        LaunchError: if no communicator is given and none is found.
    """
    backend = ("auto" if cuda else None) if isinstance(cuda, bool) else cuda
    if backend is not None and backend not in CUDA_BACKENDS:
        raise ParamError(f"cuda={cuda!r} is unknown; it may be a bool or one of {', '.join(CUDA_BACKENDS)}")
    if dist.is_initialized():
        raise ParamError("torch.distributed is initialized already; call destroy_process_group() first.")
    communicator = communicator_for("init_process_group", communicator)
    register()
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    rendezvous = _fresh_keys(communicator)
    store = RendezvousStore(rendezvous, timeout_s=timeout_s)
    _cuda_backends[communicator] = backend
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
    """Create a group; torch calls this with c10d's ``DistributedBackendOptions``."""
    timeout, world = options.timeout, _world()
    timeout_s = to_seconds(timeout) if isinstance(timeout, timedelta) else float(timeout)
    if world is None:
        forget_meshes()  # those of earlier default groups; for GPUs, Parallelism.lay_out does it
    elif timeout == default_pg_timeout:
        timeout_s = world.timeout_s  # torch's default for groups without a timeout is half an hour
    prepared = _given.pop() if _given else None
    base_store, owns_communicator = None, False
    rendezvous: Rendezvous
    if prepared is not None:
        communicator, rendezvous, base_store = prepared
    elif _is_whole_job(options, timeout_s):
        of_job = current_communicator()
        assert of_job is not None, "a rank of a job has one"
        communicator, rendezvous = of_job, _fresh_keys(of_job)
    else:
        rendezvous, owns_communicator = StoreRendezvous(options.store).view("sparkdl"), True
        if world is not None:
            ranks = "-".join(map(str, options.global_ranks_in_group))
            rendezvous = world.rendezvous.view(f"group/{options.group_id}/{ranks}")
        communicator = _open_for_group(options, rendezvous, timeout_s)
    backend = _cuda_backends.get(communicator if world is None else world.communicator, "auto")
    accelerator = None
    if backend is not None and (chosen := agree_on_backend(backend, communicator, rendezvous, timeout_s)):
        accelerator = open_chosen(chosen, communicator, rendezvous, options.store, timeout_s)
    return SparkdlProcessGroup(
        communicator,
        options.store,
        rendezvous,
        timeout_s=timeout_s,
        owns_communicator=owns_communicator,
        base_store=base_store,
        accelerator=accelerator,
    )


def _is_whole_job(options: Any, timeout_s: float) -> bool:
    """Whether a default group made by ``env://`` has the ranks of this process's job, with the same numbers.

    Collective among the ranks of the group; the result is the same on all of them.
    """
    job, current = job_of(options.store), current_job()
    if job is None and current is not None and _world() is None:
        _note_elsewhere(current, options.group_size)  # the ranks meet in a store that the program has chosen
    if job is None or options.global_ranks_in_group or options.group_size != job.world_size:
        return False
    numbers = all_gather_bytes(
        StoreRendezvous(options.store).view("sparkdl"),
        key="numbers",
        rank=options.group_rank,
        world_size=options.group_size,
        value=str(job.rank).encode(),
        timeout_s=timeout_s,
    )
    return [int(number) for number in numbers] == list(range(options.group_size))


def _open_for_group(options: Any, rendezvous: Rendezvous, timeout_s: float) -> Communicator:
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
        host_of_rank=world.communicator.topology.hosts_of(options.global_ranks_in_group)
        if world is not None
        else None,
        # A group is a process set of the communicator below: measured and watched together with it.
        stall_check=parent.stall_check if parent is not None else None,
        telemetry=parent.telemetry if parent is not None else None,
        world_ranks=options.global_ranks_in_group or None,  # none for the default group
    )


def _world() -> SparkdlProcessGroup | None:
    """The default group if its backend is ``"sparkdl"``, else None."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return group if isinstance(group, SparkdlProcessGroup) else None


def _fresh_keys(communicator: Communicator) -> Rendezvous:
    """A part of the communicator's rendezvous that no earlier default group over it has used.

    torch numbers its groups from zero again after ``destroy_process_group``.
    """
    _num_inits[communicator] = _num_inits.get(communicator, 0) + 1
    return communicator.rendezvous.view(f"torch/{communicator.name}/{_num_inits[communicator]}")


def _shared_secret(rendezvous: Rendezvous, rank: int, timeout_s: float) -> bytes:
    """A secret that the group's first rank makes and shares through the store; it is as safe as the user's store."""
    if rank == 0:
        rendezvous.set("secret", new_secret())
    return rendezvous.get("secret", timeout_s)
