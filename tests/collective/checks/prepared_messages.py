"""The messages of one step of a program on one rank, which sends one and receives one. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.collective.checks.element_types import as_argument, at_odd_address, draw_elements, stored_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparkdl.collective import Communicator
    from sparkdl.collective.communicator import Handle
    from tests.collective.scenes.programs import Operation, Step


class PreparedMessages:
    """The message that a rank sends, and the buffer for the message that it receives.

    Args:
        step: step of the program.
        rank: this rank.
        world_size: number of ranks of the communicator.
    """

    def __init__(self, step: Step, rank: int, world_size: int) -> None:
        self._step = step
        self._rank = rank
        self._operation = step.operation_of(rank)
        shift = self._operation.shift
        self._to, self._source = (rank + shift) % world_size, (rank - shift) % world_size
        self._sent = _elements(self._operation, rank).copy()
        size = self._operation.sizes[self._source]
        self._got = np.zeros(size, stored_type(self._operation.dtype))
        if self._operation.misaligned:
            self._sent, self._got = at_odd_address(self._sent), at_odd_address(self._got)

    def call(self, communicator: Communicator, *, asynchronous: bool) -> Iterator[Handle]:
        """Send and receive; yield the handles to wait for."""
        dtype, tag = self._operation.dtype, self._operation.tag
        sent, got = as_argument(self._sent, dtype), as_argument(self._got, dtype)
        # If every rank waited until its message was received, all ranks would wait for each other.
        yield communicator.send_async(sent, to=self._to, tag=tag)
        if asynchronous:
            yield communicator.recv_async(got, source=self._source, tag=tag)
        else:
            communicator.recv(got, source=self._source, tag=tag)

    def check(self, mismatches: list[str]) -> None:
        """Assert that a matching message has arrived, and that both ends report a mismatched one."""
        expected = [
            (sender, receiver)
            for sender, receiver in ((self._rank, self._to), (self._source, self._rank))
            if not self._fits(sender, receiver)
        ]
        what = f"rank {self._rank}: {self._step}: "
        assert len(mismatches) == len(expected), f"{what}{mismatches} for {expected}"
        for sender, receiver in expected:
            size, dtype = self._step.operation_of(sender).sizes[sender], self._step.operation_of(sender).dtype
            said = f"rank {sender} said send of {size} {dtype} to rank {receiver}"
            assert any(said in message for message in mismatches), f"{what}{mismatches} without {said!r}"
        if self._fits(self._source, self._rank):
            wanted = _elements(self._step.operation_of(self._source), self._source)
            assert self._got.tobytes() == wanted.tobytes(), f"{what}got {self._got}, and not {wanted}"
        else:
            assert not self._got.any(), f"{what}written though it did not fit"

    def _fits(self, sender: int, receiver: int) -> bool:
        sends, receives = self._step.operation_of(sender), self._step.operation_of(receiver)
        return (sends.dtype, sends.sizes[sender]) == (receives.dtype, receives.sizes[sender])


def _elements(operation: Operation, rank: int) -> np.ndarray:
    return draw_elements(operation.dtype, operation.numbers, (operation.sizes[rank],), (operation.seed, rank))
