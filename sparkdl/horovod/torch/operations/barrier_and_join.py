"""``hvd.barrier`` and ``hvd.join``, and the other requests without tensors.

A rank that has asked to join, but still has other requests, runs a stand-in with zeros when the other ranks run one
of their requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.request import Description, Kind, Request
from sparkdl.horovod.torch.handles import run_now
from sparkdl.horovod.torch.operations import device_route
from sparkdl.horovod.torch.operations.adasum import AdasumRequest
from sparkdl.horovod.torch.operations.allreduce import AllreduceRequest
from sparkdl.horovod.torch.operations.preparation import gather_numbers, refuse_ranks_that_joined
from sparkdl.horovod.torch.process_sets import ProcessSet, engine_of, global_process_set


class BarrierRequest(Request[None]):
    """Completes when all ranks have reached it."""

    def __init__(self, name: str) -> None:
        """Make the request.

        Args:
            name: name under which the request is matched.
        """
        super().__init__(Description(kind=Kind.BARRIER, name=name))

    def match(self, communicator: Communicator) -> None:
        """Wait for the other ranks."""
        communicator.barrier(name=self.label)


class ProcessSetsRequest(Request[None]):
    """Synchronizes all ranks for a change of the process sets. None may have joined: it would miss the change."""

    def __init__(self, about: str, when_met: Callable[[], None]) -> None:
        """Make the request.

        Args:
            about: description of the change, on which the ranks must agree.
            when_met: function called when all ranks have reached this request; its place among the other requests is
                the same on all ranks.
        """
        # One name for all changes, so that ranks that ask for different changes get an error.
        super().__init__(Description(kind=Kind.PROCESS_SETS, name="process_set", about=about))
        self._when_met = when_met
        self._given = np.zeros((0, 0), np.int64)

    def match(self, communicator: Communicator) -> None:
        """Gather a one from every rank; ranks that have joined contribute a zero."""
        self._given = gather_numbers(communicator, (), self.label)

    def complete(self, communicator: Communicator) -> None:  # noqa: ARG002  # argument of Request
        """Make the change."""
        refuse_ranks_that_joined(Kind.PROCESS_SETS, self._given)
        self._when_met()


class JoinRequest(Request[int]):
    """Takes part with zeros in the requests of the other ranks, until all ranks have asked to join."""

    def __init__(self) -> None:
        super().__init__(Description(kind=Kind.JOIN, name="join"))
        self._last = -1

    def match(self, communicator: Communicator) -> None:
        """Join."""
        self._last = communicator.join()

    def result(self) -> int:
        """The rank that joined last."""
        return self._last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of a process set has arrived."""
    run_now(engine_of(process_set, "Barrier"), BarrierRequest("barrier"))


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have done so.

    Meanwhile this rank contributes zeros to the ``allreduce`` of the other ranks (an average is still over all ranks)
    and takes part in their ``barrier``. Their other operations fail.

    Args:
        device: ignored; Horovod creates its zeros on this device.

    Returns:
        The rank that joined last.
    """
    return run_now(engine_of(global_process_set, "Join"), JoinRequest())


def make_stand_in(description: Description) -> Request[Any]:
    """Make the same request with zeros for tensors; only for kinds that can run while ranks have joined."""
    device = device_route.routes.device_of(description.device)
    zeros = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for shape, dtype in zip(description.shapes, description.dtypes, strict=True)
    ]
    if description.kind is Kind.BARRIER:
        return BarrierRequest(description.name)
    reductions = {Kind.ALLREDUCE: AllreduceRequest, Kind.ADASUM: AdasumRequest}
    return reductions[description.kind](
        description.name,
        zeros,
        zeros,
        op=description.op,
        prescale=description.prescale,
        postscale=description.postscale,
        is_group=True,
    )
