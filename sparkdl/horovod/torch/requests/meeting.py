"""Requests without tensors: to meet the other ranks, and to join."""

from __future__ import annotations

from collections.abc import Callable

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Description, Kind
from sparkdl.horovod.torch.engine.request import Request


class BarrierRequest(Request[None]):
    """Is done when all ranks have come to it."""

    def __init__(self, name: str, when_met: Callable[[], None] | None = None, *, about: str = "") -> None:
        """Make the request.

        Args:
            name: by which it is matched.
            about: what the ranks meet for and must agree on, in words.
            when_met: called when all ranks are here, in the same place among the other requests on all of them.
        """
        super().__init__(Description(kind=Kind.BARRIER, name=name, about=about))
        self._when_met = when_met

    def match(self, communicator: Communicator) -> None:
        """Meet the other ranks."""
        communicator.barrier(name=self.label)

    def complete(self, communicator: Communicator) -> None:  # noqa: ARG002  # the contract's
        """Call what was to be called."""
        if self._when_met is not None:
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
