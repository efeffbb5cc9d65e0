"""One fate for an NCCL group and the communicator that it was opened over. Runs on ranks.

NCCL hears late or never that a peer has died, and cannot name it; the communicator can do both. And whoever aborts
NCCL aborts its own rank alone; the communicator tells the others.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from sparkdl.collective.deadline import Deadline
from sparkdl.errors import CommunicatorError

if TYPE_CHECKING:
    from sparkdl._native import NcclCommunicator
    from sparkdl.collective.communicator import Communicator

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
"""Between two looks at operations under way: NCCL neither knows deadlines nor tells of errors by itself."""

_NEWS_S = 1.0
"""How long the communicator may take to say itself who died."""


class NcclWatch:
    """Aborts either when the other has failed, by a thread that sleeps while nothing is under way.

    Args:
        core: the NCCL communicator.
        communicator: the communicator below.
        name: what the group is called in messages.
    """

    def __init__(self, core: NcclCommunicator, communicator: Communicator, name: str) -> None:
        self._core = core
        self._communicator = communicator
        self._name = name
        self._started = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"sparkdl-{name}-watch", daemon=True)
        self._thread.start()

    def note_start(self) -> None:
        """Something has been put on a stream."""
        self._started.set()

    def check(self) -> None:
        """Raise the communicator's error if it has failed."""
        if self._communicator.failure is not None:
            raise self._communicators_error()

    def explain(self, error: CommunicatorError) -> CommunicatorError:
        """The error to raise when NCCL gave this one: the communicator's where it knows more.

        Waits a moment for the communicator's news, then aborts it, so that the other ranks hear.
        """
        deadline = Deadline(_NEWS_S)
        while self._communicator.failure is None and not deadline.expired:
            self._closed.wait(0.02)
        if self._communicator.failure is None:
            self._communicator.abort(f"{self._name}: {error}")
            return error
        return self._communicators_error()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._started.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._started.wait()
            self._started.clear()
            while self._core.busy and not self._closed.wait(_LOOK_S):
                self._look()
            if not self._closed.is_set():
                self._look()

    def _look(self) -> None:
        failure = self._communicator.failure
        if failure is not None:
            self._core.abort(failure)
        elif self._core.failure is not None:
            self.explain(CommunicatorError(self._core.failure))

    def _communicators_error(self) -> CommunicatorError:
        """What the communicator failed with, which every further operation raises."""
        try:
            self._communicator.barrier()
        except CommunicatorError as error:
            self._core.abort(str(error))
            return error
        raise AssertionError(f"a failed communicator took part in a barrier: {self._communicator.failure}")
