"""What ``sparkdl bench allreduce`` compares: each contender's allreduce in place on a float32 buffer.

Runs on the *rank*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sparkdl.bench.measurement import Ranks
from sparkdl.collective import RendezvousClient, open_communicator

_TIMEOUT_S = 120.0

Operation = tuple[Ranks, Callable[[Any], None], Callable[[Any], Any]]
"""This rank, the operation, and what makes its buffer of a NumPy array."""


@contextmanager
def native(rendezvous: RendezvousClient, secret: bytes, rank: int, world_size: int) -> Iterator[Operation]:
    """The native core through its communicator."""
    with open_communicator(
        rendezvous=rendezvous, rank=rank, world_size=world_size, secret=secret, timeout_s=_TIMEOUT_S
    ) as communicator:
        ranks = Ranks(rank=rank, world_size=world_size, rendezvous=rendezvous, barrier=communicator.barrier)
        yield ranks, communicator.allreduce, _unchanged


@contextmanager
def torch_native(
    rendezvous: RendezvousClient, secret: bytes, rank: int, world_size: int
) -> Iterator[Operation]:
    """The native core through torch.distributed."""
    import torch
    import torch.distributed as dist

    import sparkdl.torch

    with open_communicator(
        rendezvous=rendezvous, rank=rank, world_size=world_size, secret=secret, timeout_s=_TIMEOUT_S
    ) as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=_TIMEOUT_S)
        ranks = Ranks(rank=rank, world_size=world_size, rendezvous=rendezvous, barrier=communicator.barrier)
        yield ranks, dist.all_reduce, torch.from_numpy
        sparkdl.torch.destroy_process_group()


@contextmanager
def gloo(rendezvous: RendezvousClient, secret: bytes, rank: int, world_size: int) -> Iterator[Operation]:  # noqa: ARG001
    """Gloo through torch.distributed."""
    import torch
    import torch.distributed as dist

    from sparkdl.torch import RendezvousStore

    store = RendezvousStore(rendezvous, timeout_s=_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    ranks = Ranks(rank=rank, world_size=world_size, rendezvous=rendezvous, barrier=dist.barrier)
    yield ranks, dist.all_reduce, torch.from_numpy
    dist.destroy_process_group()


@contextmanager
def mpi(rendezvous: RendezvousClient, secret: bytes, rank: int, world_size: int) -> Iterator[Operation]:  # noqa: ARG001
    """The MPI library itself, through mpi4py."""
    from sparkdl.collective.mpi_library import load_mpi

    library = load_mpi()
    world = library.COMM_WORLD

    def allreduce(array: np.ndarray[Any, Any]) -> None:
        world.Allreduce(library.IN_PLACE, array)

    ranks = Ranks(rank=rank, world_size=world_size, rendezvous=rendezvous, barrier=world.Barrier)
    yield ranks, allreduce, _unchanged


@contextmanager
def copy(rendezvous: RendezvousClient, secret: bytes, rank: int, world_size: int) -> Iterator[Operation]:
    """No contender but the measure of all: every rank copies a buffer of the same size, at the same time."""
    with native(rendezvous, secret, rank, world_size) as (ranks, _, _):
        targets: dict[int, np.ndarray[Any, Any]] = {}

        def copy_once(array: np.ndarray[Any, Any]) -> None:
            if array.size not in targets:
                targets.clear()
                targets[array.size] = np.zeros_like(array)
            np.copyto(targets[array.size], array)

        yield ranks, copy_once, _unchanged


def _unchanged(array: Any) -> Any:
    return array


CONTENDERS = {"native": native, "torch": torch_native, "gloo": gloo, "mpi": mpi, "copy": copy}
