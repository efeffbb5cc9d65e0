"""Opens a library on one rank for the duration of the benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from sparkdl.collective import (
    Communicator,
    RendezvousClient,
    open_communicator,
    set_current_communicator,
)

_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class RankSession:
    """One rank of a library.

    Attributes:
        communicator: communicator of sparkdl, which the ranks of every library have. Its barrier lets all ranks begin
            at the same time; otherwise it sleeps.
    """

    communicator: Communicator

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that measure together."""
        return self.communicator.world_size


@contextmanager
def open_session(
    library: str,
    rendezvous: RendezvousClient,
    secret: bytes,
    rank: int,
    world_size: int,
    *,
    wire: str = "float32",
) -> Iterator[RankSession]:
    """Open a library; called on all ranks. ``library`` is a key of :data:`sparkdl.bench.libraries.LIBRARIES`."""
    with open_communicator(
        rendezvous=rendezvous,
        rank=rank,
        world_size=world_size,
        secret=secret,
        timeout_s=_TIMEOUT_S,
        wire=wire,
    ) as communicator:
        close = _OPENERS[library](communicator, rendezvous)
        yield RankSession(communicator=communicator)
        close()


# All openers have the same signature; most do not use the rendezvous.


def _open_nothing(_: Communicator, __: RendezvousClient) -> Callable[[], None]:
    return lambda: None


def _open_torch(communicator: Communicator, _: RendezvousClient) -> Callable[[], None]:
    import sparkdl.torch

    sparkdl.torch.init_process_group(communicator, timeout_s=_TIMEOUT_S, cuda=False)
    return sparkdl.torch.destroy_process_group


def _open_drop_in(communicator: Communicator, _: RendezvousClient) -> Callable[[], None]:
    import sparkdl.horovod.torch as hvd

    set_current_communicator(communicator)
    hvd.init()
    return hvd.shutdown


def _open_gloo(communicator: Communicator, rendezvous: RendezvousClient) -> Callable[[], None]:
    import torch.distributed as dist

    from sparkdl.torch import RendezvousStore

    store = RendezvousStore(rendezvous, timeout_s=_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=communicator.rank, world_size=communicator.world_size)

    return partial(_end_gloo, store)


def _end_gloo(_: object) -> None:
    """End Gloo's process group.

    The argument keeps the store alive until then, as C++ has no reference to the Python object.
    """
    import torch.distributed as dist

    dist.destroy_process_group()


def _open_mpi(communicator: Communicator, _: RendezvousClient) -> Callable[[], None]:
    from sparkdl.collective.mpi.library import load_mpi

    # As mpiexec --bind-to core does. MPI's ranks wait without sleeping: if the scheduler leaves two of them on one
    # core, an operation of microseconds takes milliseconds.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[communicator.rank % len(cores)]})
    load_mpi()
    return lambda: None


def _open_gloo_and_mpi(communicator: Communicator, rendezvous: RendezvousClient) -> Callable[[], None]:
    _open_mpi(communicator, rendezvous)
    return _open_gloo(communicator, rendezvous)


def _open_horovod(_: Communicator, __: RendezvousClient) -> Callable[[], None]:
    hvd = import_module("horovod.torch")
    hvd.init()
    close: Callable[[], None] = hvd.shutdown
    return close


_OPENERS = {
    "native": _open_nothing,
    "torch": _open_torch,
    "drop-in": _open_drop_in,
    "gloo": _open_gloo,
    "gloo tuned": _open_gloo,
    "mpi": _open_mpi,
    "gloo and mpi": _open_gloo_and_mpi,
    "horovod": _open_horovod,
    "feed": _open_nothing,
    "feed of petastorm": _open_nothing,
    "feed of arrow": _open_nothing,
    "feed of torch": _open_nothing,
}
