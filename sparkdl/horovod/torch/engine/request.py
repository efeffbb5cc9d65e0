"""What an engine runs: the contract of every request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.engine.description import Description

Result = TypeVar("Result")


class Request(ABC, Generic[Result]):
    """An operation that was asked for. It runs once, on whatever thread drives the engine.

    Attributes:
        description: what the ranks must agree on.
        label: the same in one line, which goes with the operation as its name.
        done: whether it has run or failed.
        is_awaited: whether a thread sleeps until it is done.
        blocks_caller: whether a thread cannot go on before it is done, be it asleep or driving the engine.
        error: what it failed with.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.label = description.label
        self.done = False
        self.is_awaited = False
        self.blocks_caller = False
        self.error: BaseException | None = None

    @abstractmethod
    def match(self, communicator: Communicator) -> None:
        """Run the first operation of the communicator, under ``label``.

        Raises:
            MismatchError: on all ranks, if they are not at the same request. Nothing has been written then.
        """

    def complete(self, communicator: Communicator) -> None:  # many requests are complete by then
        """Do the rest, which all ranks do now.

        Raises:
            HorovodInternalError: on all ranks alike, if the request cannot be carried out; the others can still be.
        """

    @abstractmethod
    def result(self) -> Result:
        """What the request gave; only once it is done."""
