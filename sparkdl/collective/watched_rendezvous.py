"""A rendezvous for what belongs to a communicator: waiting there ends when that fails or is dropped. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.collective.deadline import Deadline
from sparkdl.collective.rendezvous import PrefixRendezvous
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.rendezvous import Rendezvous

_LOOK_AROUND_S = 0.2


def check_alive(reference: weakref.ref[Communicator]) -> Communicator:
    """Return the communicator.

    Raises:
        CommunicatorError: if it has failed, or nobody has it any more.
    """
    communicator = reference()
    if communicator is None:
        raise CommunicatorError("the communicator was dropped")
    if communicator.failure is not None:
        raise CommunicatorError(communicator.failure)
    return communicator


class WatchedRendezvous(PrefixRendezvous):
    """A part of a rendezvous in which waits end when a communicator fails."""

    def __init__(self, rendezvous: Rendezvous, communicator: weakref.ref[Communicator]) -> None:
        super().__init__(rendezvous, "messages")
        self._communicator = communicator

    def exchange(
        self, key: str, *, rank: int, world_size: int, value: bytes, timeout_s: float
    ) -> list[bytes] | frozenset[int]:
        """See :class:`~sparkdl.collective.rendezvous.Exchanges`."""
        deadline = Deadline(timeout_s)
        while True:
            check_alive(self._communicator)
            values = super().exchange(
                key,
                rank=rank,
                world_size=world_size,
                value=value,
                timeout_s=deadline.at_most(_LOOK_AROUND_S).timeout_s,
            )
            if isinstance(values, list) or deadline.expired:
                return values

    def get(self, key: str, timeout_s: float) -> bytes:
        """See :class:`~sparkdl.collective.rendezvous.Rendezvous`."""
        deadline = Deadline(timeout_s)
        while True:
            check_alive(self._communicator)
            try:
                return super().get(key, deadline.at_most(_LOOK_AROUND_S).timeout_s)
            except CommunicatorTimeoutError:
                if deadline.expired:
                    raise

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`~sparkdl.collective.rendezvous.Rendezvous`."""
        check_alive(self._communicator)
        return super().check(keys)
