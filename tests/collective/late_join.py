"""A rank that is the last to join an operation, whatever the load of the machine. Runs on ranks."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.collective.telemetry.stalls import pending_waits
from tests.collective.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparkdl.collective import Communicator

_TIMEOUT_S = 15.0
"""Below the default deadline of an operation, so that the error names a late rank that gives up."""


@contextmanager
def joined_last(
    communicator: Communicator, operation: str, *, late_rank: int, key: str, wait_s: float
) -> Iterator[None]:
    """Hold the late rank back until every other rank has waited for ``wait_s`` in the operation that runs inside.

    Letting the late rank sleep would not suffice: on a busy machine another rank may be later than that.

    Args:
        communicator: communicator whose ranks all call this.
        operation: beginning of the operation's text in ``pending_waits()``.
        late_rank: rank in ``communicator`` that joins last.
        key: key in the rendezvous, unique per communicator.
        wait_s: minimum time in seconds that the other ranks wait, except for the moment between begin and wait.
    """
    if communicator.rank == late_rank:
        for other in range(communicator.world_size):
            if other != late_rank:
                communicator.rendezvous.get(f"{key}/waits/{other}", _TIMEOUT_S)
        yield
        return

    def has_waited() -> bool:
        return any(
            wait.communicator == communicator.name
            and wait.operation.startswith(operation)
            and wait.waited_s > wait_s
            for wait in pending_waits()
        )

    def tell() -> None:
        if eventually(has_waited, timeout_s=_TIMEOUT_S):
            communicator.rendezvous.set(f"{key}/waits/{communicator.rank}", b"")

    watcher = threading.Thread(target=tell)
    watcher.start()
    yield
    watcher.join()
