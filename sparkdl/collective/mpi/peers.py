"""Notices about other ranks that MPI does not provide: which rank died, which failed and why, and which is missing.

The notices are sent through the rendezvous; one thread per communicator waits for them.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING, Any

from sparkdl.errors import (
    CommunicatorAbortedError,
    CommunicatorError,
    CommunicatorTimeoutError,
    RankLostError,
)
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.store import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_WAIT_S = 600.0
_ROLL_CALL_S = 2.0

_ERRORS = {error.__name__: error for error in (CommunicatorAbortedError, CommunicatorTimeoutError)}
"""Exception classes of a failed rank that the other ranks raise too; others become :class:`CommunicatorError`."""


class PeerWatch:
    """Watches the peers of one communicator from its opening until all ranks have left it.

    Args:
        rendezvous: part of the rendezvous for this communicator only.
        rank: number of this rank.
        world_size: number of ranks.
        position: function that returns the number of operations that this rank has joined so far.

    Attributes:
        failure: failure of this communicator, of this rank or another one; None while there is none.
        failed: event that is set with the failure.
    """

    def __init__(
        self, rendezvous: Rendezvous, *, rank: int, world_size: int, position: Callable[[], int]
    ) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._world_size = world_size
        self._position = position
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._roll_calls: list[int] = []
        self._closed = False
        self.failure: CommunicatorError | None = None
        self.failed = threading.Event()
        self._lock = threading.Lock()
        rendezvous.post_if_lost("notices", self._notice("lost"))
        threading.Thread(target=self._watch, name="sparkdl-peer-watch", daemon=True).start()

    def abort(self, reason: str) -> None:
        """Make this and every other rank fail with ``reason``."""
        self._fail(CommunicatorAbortedError(f"rank {self._rank} aborted: {reason}"))
        self._post("aborted", reason=reason)

    def pass_on(self, failure: CommunicatorError) -> None:
        """Make every other rank fail with the failure of this rank, instead of waiting for this rank."""
        self._post("failed", error=type(failure).__name__, reason=f"rank {self._rank}: {failure}")

    def roll_call(self) -> list[int]:
        """Ask all ranks how many operations they have joined; return the ranks that are behind or do not answer."""
        number = self._rendezvous.post("notices", self._notice("roll call"))
        deadline = Deadline(_ROLL_CALL_S)
        missing = []
        for rank in range(self._world_size):
            try:
                answer = self._rendezvous.get(f"roll calls/{number}/{rank}", deadline.remaining_s())
            except CommunicatorTimeoutError:
                missing.append(rank)
                continue
            if int(answer) < self._position():
                missing.append(rank)
        return missing

    def leave(self) -> None:
        """Publish that this rank leaves without failure."""
        self._closed = True
        try:
            self._rendezvous.post_if_lost("notices", b"")
        except CommunicatorError as error:
            logger.debug("The rendezvous was closed before its communicator: %s", error)
            return
        self._post("left")

    def _watch(self) -> None:
        number = 1
        # Continues after a failure: the last rank to leave deletes the keys.
        while len(self._left | self._lost) < self._world_size:
            try:
                notice = self._rendezvous.get(f"notices/{number}", _WAIT_S)
                self._take(number, json.loads(notice))
            except CommunicatorTimeoutError:
                continue
            except CommunicatorError as error:
                if not self._closed:
                    self._fail(CommunicatorError(f"cannot watch the other ranks any more: {error}"))
                return
            number += 1
        try:
            self._clear_up(number - 1)
        except CommunicatorError as error:
            logger.debug("The rendezvous was closed before its keys were deleted: %s", error)

    def _clear_up(self, num_notices: int) -> None:
        """Delete the keys of this communicator, once all ranks that are not lost have read the last notice."""
        if self._rendezvous.add("readers", 1) < self._world_size - len(self._lost - self._left):
            return
        answers = [
            f"roll calls/{number}/{rank}" for number in self._roll_calls for rank in range(self._world_size)
        ]
        notices = [f"notices/{number}" for number in range(1, num_notices + 1)]
        for key in [*answers, *notices, "notices/count", "readers"]:
            self._rendezvous.delete(key)

    def _take(self, number: int, notice: dict[str, Any]) -> None:
        kind, rank = notice["kind"], notice["rank"]
        if kind == "left":
            self._left.add(rank)
        elif kind == "lost":
            self._lost.add(rank)
            self._fail(RankLostError(f"rank {rank} died: its connection to the coordinator ended"))
        elif kind == "aborted":
            self._fail(CommunicatorAbortedError(f"rank {rank} aborted: {notice['reason']}"))
        elif kind == "failed" and rank != self._rank:
            self._fail(_ERRORS.get(notice["error"], CommunicatorError)(notice["reason"]))
        elif kind == "roll call":
            self._roll_calls.append(number)
            self._rendezvous.set(f"roll calls/{number}/{self._rank}", str(self._position()).encode())

    def _fail(self, failure: CommunicatorError) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = failure
                self.failed.set()

    def _notice(self, kind: str, **details: str) -> bytes:
        return json.dumps({"kind": kind, "rank": self._rank, **details}).encode()

    def _post(self, kind: str, **details: str) -> None:
        try:
            self._rendezvous.post("notices", self._notice(kind, **details))
        except CommunicatorError as error:
            logger.warning("Cannot notify the other ranks that this one has %s: %s", kind, error)
