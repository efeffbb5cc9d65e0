"""The operations that ``sparkdl bench allreduce`` times: allreduce of each contender, in place on float32 buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparkdl.bench.contenders.sessions import Trial
from sparkdl.collective import Communicator

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An implementation of allreduce.

    Attributes:
        allreduce: function that sums a buffer over the ranks, in place.
        allreduce_queued: function that submits the sums of several buffers before it waits for the first.
        allocate: function that allocates an array of a number of float32 elements; called on all ranks at once.
        after_timing: function that every rank calls after the time has been taken.
        wrap: function that converts such an array to the buffer that ``allreduce`` and ``allreduce_queued`` take, over
            the same memory.
        sums: whether the result is a sum to check; False for other operations.
    """

    allreduce: Callable[[Any], object]
    allreduce_queued: Callable[[Sequence[Any]], object]
    allocate: Callable[[int], FloatArray] = lambda num_elements: np.empty(num_elements, np.float32)
    after_timing: Callable[[], object] = lambda: None
    wrap: Callable[[FloatArray], Any] = lambda array: array
    sums: bool = True


class AllreduceTrial(Trial):
    """Allreduces of one size by one contender, on buffers that take turns."""

    def __init__(
        self,
        communicator: Communicator,
        contender: Contender,
        *,
        num_bytes: int,
        num_tensors: int,
        num_buffers: int,
    ) -> None:
        elements = max(1, num_bytes // 4)
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._contender = contender
        memory = contender.allocate(num_buffers * num_tensors * elements)
        self._arrays = [list(arrays) for arrays in memory.reshape(num_buffers, num_tensors, elements)]
        self._buffers = [[contender.wrap(array) for array in arrays] for arrays in self._arrays]
        self._one = contender.allreduce if num_tensors == 1 else contender.allreduce_queued
        self._next = 0
        self._repetition = 0
        self._order: list[int] = []
        self._schedule: list[Any] = []

    def prepare(self, repetition: int, operations: int) -> None:
        """Rewrite all buffers, also unused ones, so that the caches are in the same state for every contender."""
        for arrays in self._arrays:
            for array in arrays:
                array.fill(self._rank + 1 + repetition)
        self._repetition = repetition
        num_buffers = len(self._arrays)
        self._order = [(self._next + index) % num_buffers for index in range(operations)]
        self._next = (self._next + operations) % num_buffers
        self._schedule = [
            self._buffers[index] if len(self._buffers[index]) > 1 else self._buffers[index][0]
            for index in self._order
        ]

    def run(self, operations: int) -> None:
        """Run the schedule that was prepared for this number of operations."""
        assert operations == len(self._schedule)
        operation = self._one
        for buffers in self._schedule:
            operation(buffers)

    def check(self) -> None:
        """Check that every used buffer holds the sum over all ranks, summed as often as the buffer was used."""
        self._contender.after_timing()
        if not self._contender.sums:
            return
        total = sum(rank + 1 + self._repetition for rank in range(self._world_size))
        for index in set(self._order):
            expected = np.float32(total) * np.float32(self._world_size) ** (self._order.count(index) - 1)
            for array in self._arrays[index]:
                if not (np.isclose(array[0], expected) and np.isclose(array[-1], expected)):
                    raise AssertionError(
                        f"the allreduce gave {array[0]} and {array[-1]} instead of {expected}"
                    )


def _native(communicator: Communicator) -> Contender:
    """The native core through its communicator."""
    return Contender(
        allreduce=communicator.allreduce,
        allreduce_queued=lambda arrays: _wait_for([communicator.allreduce_async(array) for array in arrays]),
    )


def _arena(communicator: Communicator) -> Contender:
    """The native core, on buffers that lie in memory shared by the ranks."""
    return dataclasses.replace(
        _native(communicator),
        allocate=lambda num_elements: communicator.allocate(4 * num_elements).view(np.float32),
    )


def _torch(_: Communicator) -> Contender:
    """torch.distributed, on its default process group."""
    import torch
    import torch.distributed as dist

    return Contender(
        allreduce=dist.all_reduce,
        allreduce_queued=lambda tensors: _wait_for(
            [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        ),
        wrap=torch.from_numpy,
    )


def _mpi(_: Communicator) -> Contender:
    """The MPI library itself, through mpi4py."""
    from sparkdl.collective.mpi.library import load_mpi

    library = load_mpi()
    world = library.COMM_WORLD

    # MPICH moves data only inside its calls: a rank that has finished and waits for something else would leave the
    # others waiting for the rest of its data.
    return Contender(
        allreduce=partial(world.Allreduce, library.IN_PLACE),
        allreduce_queued=lambda arrays: library.Request.Waitall(
            [world.Iallreduce(library.IN_PLACE, array) for array in arrays]
        ),
        after_timing=world.Barrier,
    )


def _horovod(_: Communicator) -> Contender:
    """Horovod itself. Tensors keep their names, as Horovod caches the negotiation of the ranks by name."""
    from importlib import import_module

    import torch

    hvd = import_module("horovod.torch")

    def queued(tensors: Sequence[Any]) -> None:
        handles = [
            hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"{tensor.numel()}.{index}")
            for index, tensor in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return Contender(
        allreduce=lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name=f"{tensor.numel()}"),
        allreduce_queued=queued,
        wrap=torch.from_numpy,
    )


def _copy(_: Communicator) -> Contender:
    """The yardstick, not a contender: every rank copies a buffer of the same size, at the same time."""

    def copy_all(pairs: Sequence[tuple[FloatArray, FloatArray]]) -> None:
        for pair in pairs:
            np.copyto(*pair)

    return Contender(
        allreduce=lambda pair: np.copyto(*pair),
        allreduce_queued=copy_all,
        wrap=lambda array: (np.zeros_like(array), array),
        sums=False,
    )


def _wait_for(operations: Iterable[Any]) -> None:
    for operation in operations:
        operation.wait()


CONTENDERS: dict[str, Callable[[Communicator], Contender]] = {
    "copy": _copy,
    "native": _native,
    "arena": _arena,
    "torch": _torch,
    "gloo": _torch,
    "gloo tuned": _torch,
    "mpi": _mpi,
    "intel mpi": _mpi,
    "horovod": _horovod,
}
