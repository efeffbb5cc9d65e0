"""Where the tasks of a job post the first failure and learn of it. Runs in the barrier tasks."""

from __future__ import annotations

import threading

from sparkdl.collective import PrefixRendezvous
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError
from sparkdl.launch.outcome import Failure, OnStop, StopReason
from sparkdl.rendezvous.deadline import Deadline

CULPRIT_PATIENCE_S = 3.0
"""How long a rank that failed because of another one waits for that one's task to post first."""

FAREWELL_TIMEOUT_S = 30.0
"""How long rank 0's task waits for the others after a failure."""

_FAILURE = "failure"
_LOST = "lost"
_LOOK_AGAIN_S = 60.0
_FAREWELL_LOOK_AGAIN_S = 1.0


class FailureBoard:
    """The first failure of a job, kept under one key of the tasks' rendezvous.

    Args:
        rendezvous: shared by the tasks.
        rank: this task's rank.
        host: its host.
    """

    def __init__(self, rendezvous: PrefixRendezvous, *, rank: int, host: str) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._failed = threading.Event()
        lost = Failure(
            rank=rank, host=host, error="its executor or Python worker was lost", traceback="", is_loss=True
        )
        rendezvous.post_if_lost(_LOST, lost.to_json().encode())

    def post(self, failure: Failure) -> None:
        """Make ``failure`` known unless there is one already; a consequence first waits for its cause."""
        try:
            if failure.is_consequence and not failure.is_hang:
                try:
                    self._rendezvous.get(_FAILURE, CULPRIT_PATIENCE_S)
                    return
                except CommunicatorTimeoutError:
                    pass
            self._rendezvous.compare_set(_FAILURE, b"", failure.to_json().encode())
        except (OSError, CommunicatorError):
            pass  # the coordinator is gone, and with it everyone who could read the board

    def watch(self, on_failure: OnStop) -> None:
        """Call ``on_failure`` with the reason, from a thread, once a rank or a task has failed or the board is lost."""
        for key in (_FAILURE, f"{_LOST}/1"):
            threading.Thread(
                target=self._watch, args=(key, on_failure), name="sparkdl-failures", daemon=True
            ).start()

    def finish(self) -> None:
        """Say that this task needs the coordinator no longer."""
        try:
            self._rendezvous.set(f"finished/{self._rank}", b"")
        except (OSError, CommunicatorError):
            pass  # likewise

    def wait_until_finished(self, world_size: int) -> None:
        """Wait for every task's ``finish``: as long as they work, and half a minute once one of them has failed."""
        deadline: Deadline | None = None
        for rank in range(world_size):
            while True:
                try:
                    self._rendezvous.get(f"finished/{rank}", _FAREWELL_LOOK_AGAIN_S)
                    break
                except CommunicatorTimeoutError:
                    if self._failed.is_set():
                        deadline = deadline or Deadline(FAREWELL_TIMEOUT_S)
                    if deadline is not None and deadline.expired:
                        return

    def _watch(self, key: str, on_failure: OnStop) -> None:
        while True:
            try:
                failure = Failure.from_json(self._rendezvous.get(key, _LOOK_AGAIN_S))
            except CommunicatorTimeoutError:
                continue
            except (OSError, CommunicatorError):
                reason = StopReason("the coordinator in rank 0's task is gone")
            else:
                said = f"rank {failure.rank} on {failure.host} failed: {failure.error}"
                reason = StopReason(failure.error if failure.is_hang else said, is_hang=failure.is_hang)
            break
        self._failed.set()
        on_failure(reason)
