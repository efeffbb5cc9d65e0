"""The base class of trials, and the library of one rank, which is open for the duration of the benchmark."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from sparkdl.collective import (
    Communicator,
    RendezvousClient,
    open_communicator,
    set_current_communicator,
)

_TIMEOUT_S = 120.0


class Trial(ABC):
    """One contender at one case, on one rank. A trial is made for one turn.

    Attributes:
        num_warm_ups: number of repetitions at the beginning of every turn that do not count.
    """

    num_warm_ups = 1

    def prepare(self, repetition: int, operations: int) -> None:  # noqa: B027 - most trials have nothing to prepare
        """Rewrite the data that the next operations read; not timed."""

    @abstractmethod
    def run(self, operations: int) -> None:
        """Run the operations that are timed."""

    def check(self) -> None:  # noqa: B027 - as above
        """Raise an ``AssertionError`` if the operations gave a wrong result; not timed."""

    def result(self) -> dict[str, Any]:
        """Return further results of the turn, as JSON can hold them."""
        return {}


@contextmanager
def open_session(
    library: str,
    rendezvous: RendezvousClient,
    secret: bytes,
    rank: int,
    world_size: int,
    *,
    wire: str = "float32",
) -> Iterator[Communicator]:
    """Open a library; called on all ranks.

    Args:
        library: a key of :data:`sparkdl.bench.libraries.LIBRARIES`.
        rendezvous: client of the ranks' coordinator.
        secret: secret that authenticates the ranks to each other.
        rank: number of this rank.
        world_size: number of ranks that measure together.
        wire: data type in which sums of float32 are sent between hosts.

    Yields:
        A communicator of sparkdl, which the ranks of every library have. Its barrier lets all ranks begin at the same
        time; otherwise it sleeps.
    """
    with open_communicator(
        rendezvous=rendezvous,
        rank=rank,
        world_size=world_size,
        secret=secret,
        timeout_s=_TIMEOUT_S,
        wire=wire,
    ) as communicator:
        close = _OPENERS[library](communicator, rendezvous)
        yield communicator
        close()


# All openers have the same signature; most do not use the rendezvous.
_Opener = Callable[[Communicator, RendezvousClient], Callable[[], None]]


def _open_nothing(_: Communicator, __: RendezvousClient) -> Callable[[], None]:
    return lambda: None


def _open_torch(communicator: Communicator, _: RendezvousClient) -> Callable[[], None]:
    import sparkdl.torch

    sparkdl.torch.init_process_group(communicator, timeout_s=_TIMEOUT_S, cuda=False)
    return sparkdl.torch.destroy_process_group


def _open_nccl(cuda: str) -> _Opener:
    """Return an opener of torch.distributed over sparkdl, with this backend of CUDA tensors and a GPU per rank."""

    def open_group(communicator: Communicator, _: RendezvousClient) -> Callable[[], None]:
        import torch

        import sparkdl.torch

        torch.cuda.set_device(communicator.rank)
        sparkdl.torch.init_process_group(communicator, timeout_s=_TIMEOUT_S, cuda=cuda)
        return sparkdl.torch.destroy_process_group

    return open_group


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
    "torch nccl": _open_nccl("torch"),
    "own nccl": _open_nccl("sparkdl"),
    "drop-in": _open_drop_in,
    "gloo": _open_gloo,
    "gloo tuned": _open_gloo,
    "mpi": _open_mpi,
    "intel mpi": _open_mpi,
    "gloo and mpi": _open_gloo_and_mpi,
    "horovod": _open_horovod,
    "feed": _open_nothing,
    "feed of petastorm": _open_nothing,
    "feed of arrow": _open_nothing,
    "feed of read_table": _open_nothing,
    "feed of torch": _open_nothing,
    "feed of datasets": _open_nothing,
    "feed of streaming": _open_nothing,
}
