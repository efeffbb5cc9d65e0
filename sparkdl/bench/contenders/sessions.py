"""The base class of trials, and the library of one rank, which is open for the duration of the benchmark."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
        closing = ExitStack()
        if library in _OPENERS:
            _OPENERS[library](communicator, rendezvous, closing)
        yield communicator
        closing.close()  # not after an error, in which case other ranks may not take part


def _open_torch(communicator: Communicator, _: RendezvousClient, closing: ExitStack) -> None:
    import sparkdl.torch

    sparkdl.torch.init_process_group(communicator, timeout_s=_TIMEOUT_S, cuda=False)
    closing.callback(sparkdl.torch.destroy_process_group)


def _open_nccl(cuda: str, communicator: Communicator, _: RendezvousClient, closing: ExitStack) -> None:
    """Open torch.distributed over sparkdl, with this backend of CUDA tensors and a GPU per rank."""
    import torch

    import sparkdl.torch

    torch.cuda.set_device(communicator.rank)
    sparkdl.torch.init_process_group(communicator, timeout_s=_TIMEOUT_S, cuda=cuda)
    closing.callback(sparkdl.torch.destroy_process_group)


def _open_drop_in(communicator: Communicator, _: RendezvousClient, closing: ExitStack) -> None:
    set_current_communicator(communicator)
    _open_horovod("sparkdl.horovod.torch", communicator, _, closing)


def _open_horovod(module: str, _: Communicator, __: RendezvousClient, closing: ExitStack) -> None:
    hvd = import_module(module)
    hvd.init()
    closing.callback(hvd.shutdown)


def _open_gloo(communicator: Communicator, rendezvous: RendezvousClient, closing: ExitStack) -> None:
    import torch.distributed as dist

    from sparkdl.torch import RendezvousStore

    store = RendezvousStore(rendezvous, timeout_s=_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=communicator.rank, world_size=communicator.world_size)
    # The argument keeps the store alive until then, as C++ has no reference to the Python object.
    closing.callback(lambda _: dist.destroy_process_group(), store)


def _open_mpi(communicator: Communicator, _: RendezvousClient, __: ExitStack) -> None:
    from sparkdl.collective.mpi.library import load_mpi

    # As mpiexec --bind-to core does. MPI's ranks wait without sleeping: if the scheduler leaves two of them on one
    # core, an operation of microseconds takes milliseconds.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[communicator.rank % len(cores)]})
    load_mpi()


def _open_gloo_and_mpi(communicator: Communicator, rendezvous: RendezvousClient, closing: ExitStack) -> None:
    _open_mpi(communicator, rendezvous, closing)
    _open_gloo(communicator, rendezvous, closing)


_OPENERS: dict[str, Callable[[Communicator, RendezvousClient, ExitStack], None]] = {
    "torch": _open_torch,
    "torch nccl": partial(_open_nccl, "torch"),
    "own nccl": partial(_open_nccl, "sparkdl"),
    "drop-in": _open_drop_in,
    "gloo": _open_gloo,
    "gloo tuned": _open_gloo,
    "mpi": _open_mpi,
    "intel mpi": _open_mpi,
    "gloo and mpi": _open_gloo_and_mpi,
    "horovod": partial(_open_horovod, "horovod.torch"),
}
"""Functions that open a library, of those that need it, and add to a stack what closes it."""
