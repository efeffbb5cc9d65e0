"""Requests without tensors: to meet the other ranks, and to join."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Description, Kind
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.requests.describing import refuse_ranks_that_joined


class BarrierRequest(Request[None]):
    """Is done when all ranks have come to it."""

    def __init__(self, name: str) -> None:
        """Make the request.

        Args:
            name: by which it is matched.
        """
        super().__init__(Description(kind=Kind.BARRIER, name=name))

    def match(self, communicator: Communicator) -> None:
        """Meet the other ranks."""
        communicator.barrier(name=self.label)

    def result(self) -> None:
        """Nothing."""


class ProcessSetsRequest(Request[None]):
    """Meets all ranks for a change of the process sets. None may have joined: it would not know of the change."""

    def __init__(self, about: str, when_met: Callable[[], None]) -> None:
        """Make the request.

        Args:
            about: the change, on which the ranks must agree, in words.
            when_met: called when all ranks are here, in the same place among the other requests on all of them.
        """
        # One name for whatever is about to change, so that ranks that want different changes are told so.
        super().__init__(Description(kind=Kind.PROCESS_SETS, name="process_set", about=about))
        self._when_met = when_met
        self._given = np.zeros((0, 0), np.int64)

    def match(self, communicator: Communicator) -> None:
        """Exchange a one, which a rank that has joined does not give."""
        self._given = np.zeros((communicator.world_size, 1), np.int64)
        communicator.allgather(np.array([1]), self._given, name=self.label)

    def complete(self, communicator: Communicator) -> None:  # noqa: ARG002  # the contract's
        """Make the change."""
        refuse_ranks_that_joined(Kind.PROCESS_SETS, self._given)
        self._when_met()

    def result(self) -> None:
        """Nothing."""


class JoinRequest(Request[int]):
    """Takes part, with zeros, in what the others run, until all have asked to join."""

    def __init__(self) -> None:
        super().__init__(Description(kind=Kind.JOIN, name="join"))
        self._last = -1

    def match(self, communicator: Communicator) -> None:
        """Join."""
        self._last = communicator.join()

    def result(self) -> int:
        """The rank that joined last."""
        return self._last
