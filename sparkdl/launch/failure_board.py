"""Where the tasks of a job post the first failure and learn of it. Runs in the barrier tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sparkdl.collective import Rendezvous
from sparkdl.errors import CommunicatorTimeoutError
from sparkdl.launch.outcome import Failure

CULPRIT_PATIENCE_S = 3.0
"""How long a rank that failed because of another one waits for that one's task to post first."""

_FAILURE = "failure"
_LOOK_AGAIN_S = 3600.0


class FailureBoard:
    """The first failure of a job, kept under one key of the tasks' rendezvous."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def post(self, failure: Failure) -> None:
        """Make ``failure`` known unless there is one already; a consequence first waits for its cause."""
        try:
            if failure.is_consequence:
                try:
                    self._rendezvous.get(_FAILURE, CULPRIT_PATIENCE_S)
                    return
                except CommunicatorTimeoutError:
                    pass
            self._rendezvous.compare_set(_FAILURE, b"", failure.to_json().encode())
        except OSError:
            pass  # the coordinator is gone, and with it everyone who could read the board

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Call ``on_failure`` with the reason, from a thread, once a rank has failed or the board is lost."""
        threading.Thread(target=self._watch, args=(on_failure,), name="sparkdl-failures", daemon=True).start()

    def finish(self, rank: int) -> None:
        """Say that this rank's task needs the coordinator no longer."""
        try:
            self._rendezvous.set(f"finished/{rank}", b"")
        except OSError:
            pass

    def wait_until_finished(self, world_size: int) -> None:
        """Wait for every task's ``finish``; a task that is lost makes Spark end this one as well."""
        for rank in range(world_size):
            self._await(f"finished/{rank}")

    def _watch(self, on_failure: Callable[[str], None]) -> None:
        try:
            failure = Failure.from_json(self._await(_FAILURE))
        except (OSError, ValueError, RuntimeError):
            on_failure("the coordinator in rank 0's task is gone")
            return
        on_failure(f"rank {failure.rank} on {failure.host} failed: {failure.error}")

    def _await(self, key: str) -> bytes:
        while True:
            try:
                return self._rendezvous.get(key, _LOOK_AGAIN_S)
            except CommunicatorTimeoutError:
                continue
