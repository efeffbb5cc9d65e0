"""Writes checkpoints on a thread, while training goes on, and removes those that are no longer kept. On *rank 0*."""

from __future__ import annotations

import logging
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING

from sparkdl.data.daemon_threads import DaemonThreads
from sparkdl.errors import SparkdlError, StoreError
from sparkdl.training.checkpoint import Manifest

if TYPE_CHECKING:
    from collections.abc import Collection
    from concurrent.futures import Future

    from sparkdl.training.checkpoint import Content
    from sparkdl.training.checkpoint_folder import CheckpointFolder

logger = logging.getLogger(__name__)

EARLIER_TIMEOUT_S = 240.0
"""How long a checkpoint waits for the one before it: less than other ranks wait for this one in a collective."""

LAST_TIMEOUT_S = 1800.0
"""How long the end of a fit waits for its last checkpoint."""

FAILURE_TIMEOUT_S = 1.0
"""How long a fit that failed waits for a checkpoint that is being written."""


class CheckpointWriter:
    """Takes one checkpoint at a time; the next one waits until it is written, so that two are in memory at most.

    Args:
        folder: where to write.
        num_kept: how many of the last checkpoints stay, beside the best.
        damaged: names of checkpoints that cannot be read, which go once there is another one.
    """

    def __init__(self, folder: CheckpointFolder, *, num_kept: int, damaged: Collection[str] = ()) -> None:
        self._folder = folder
        self._num_kept = num_kept
        self._damaged = set(damaged)
        self._threads = DaemonThreads(1, "sparkdl-checkpoints")
        self._writing: Future[None] | None = None

    def write(self, content: Content, *, is_best: bool = False) -> None:
        """Have a checkpoint written.

        Args:
            content: of the checkpoint; nobody changes it any more.
            is_best: whether it is kept until a better one comes.

        Raises:
            StoreError: if the one before could not be written, or still is being written after four minutes.
        """
        self.wait(EARLIER_TIMEOUT_S)
        self._writing = self._threads.submit(self._write, content, is_best)

    def wait(self, timeout_s: float = LAST_TIMEOUT_S) -> None:
        """Wait until what was given is written.

        Raises:
            StoreError: if it could not be written, or not in time.
        """
        if self._writing is None:
            return
        # A store's own timeout, which ends the writing, is a TimeoutError too.
        if wait([self._writing], timeout_s).not_done:
            raise StoreError(
                f"A checkpoint was still being written to {self._folder.url} after {timeout_s:g} s. Choose a "
                "checkpointDir on a faster store, or a larger checkpointEverySteps."
            )
        self._writing.result()
        self._writing = None

    def close(self, *, failed: bool) -> None:
        """End the thread; unless the fit has failed, wait for it and raise what :meth:`wait` does."""
        try:
            if not failed:
                self.wait()
            elif self._writing is not None:
                with suppress(Exception):  # what made the fit fail is what counts
                    self._writing.result(FAILURE_TIMEOUT_S)
        finally:
            self._threads.stop()

    def _write(self, content: Content, is_best: bool) -> None:
        name = self._folder.write(content)
        if is_best:
            self._folder.mark_best(name)
        try:
            self._remove_old(name)
        except SparkdlError as error:  # training does not depend on it
            logger.warning("Checkpoints that are no longer kept could not be removed: %s", error)

    def _remove_old(self, newest: str) -> None:
        found = list(self._folder.newest_first())
        whole = [
            name for name, manifest in found if isinstance(manifest, Manifest) and name not in self._damaged
        ]
        kept = {*whole[: self._num_kept], newest, self._folder.best()}
        for name, _ in found:
            if name not in kept:
                self._folder.remove(name)
        self._damaged.clear()
