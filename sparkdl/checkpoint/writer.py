"""Writes checkpoints on a thread while training continues, one at a time.

If a model is divided among ranks, a :class:`CheckpointWriter` has a process group of its own, so that the ranks can
write a checkpoint together while training uses the other groups.
"""

from __future__ import annotations

from concurrent import futures
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from sparkdl.checkpoint.tensors import Content, write_checkpoint
from sparkdl.data.files.threads import DaemonThreads
from sparkdl.errors import StoreError
from sparkdl.torch.process_group import BACKEND_NAME, SparkdlProcessGroup

if TYPE_CHECKING:
    from types import TracebackType

    from sparkdl.checkpoint.folder import CheckpointFolder

_DEFAULT_TIMEOUT_S = 1800.0
_FAILURE_TIMEOUT_S = 1.0
"""How long failed training waits for a checkpoint that is still being written."""

_REPORT_TIMEOUT_S = 2.0
"""How much longer a wait for a checkpoint lasts than the ranks' waits for each other, which name the missing rank."""


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes checkpoints of one folder; a context manager that waits for the last one, unless training has failed.

    Args:
        folder: folder to write to.
        is_divided: whether all ranks write each checkpoint together; the constructor and :meth:`close` are collective
            then. Otherwise this process writes all of it.
        timeout_s: seconds that ranks wait for each other, and that :meth:`write` waits for the previous checkpoint.
            None for the timeout of the default process group if that is sparkdl's, else 1800.
        advice: what to do if writing takes too long, for messages.
    """

    def __init__(
        self, folder: CheckpointFolder, *, is_divided: bool, timeout_s: float | None = None, advice: str
    ) -> None:
        self._folder, self._advice = folder, advice
        self.group: dist.ProcessGroup | None = None
        self._rank = 0
        world = dist.group.WORLD if is_divided else None
        is_ours = isinstance(world, SparkdlProcessGroup)
        if timeout_s is None:
            timeout_s = world.timeout_s if isinstance(world, SparkdlProcessGroup) else _DEFAULT_TIMEOUT_S
        self._timeout_s = timeout_s
        if is_divided:
            self._rank = dist.get_rank()
            self.group = dist.new_group(
                timeout=timedelta(seconds=timeout_s), backend=BACKEND_NAME if is_ours else "gloo"
            )
        self._threads = DaemonThreads(1, "sparkdl-checkpoints")
        self._writing: futures.Future[None] | None = None

    def write(self, content: Content) -> futures.Future[None]:
        """Write a checkpoint on the thread; wait for the previous one first.

        Args:
            content: what this rank writes, which must not change after this call.

        Returns:
            A future that is done when the checkpoint is complete; it holds the error if writing failed.

        Raises:
            StoreError: if the previous checkpoint could not be written, or not in time.
        """
        self.wait()
        self._writing = self._threads.submit(write_checkpoint, self._folder, content, self._rank, self.group)
        return self._writing

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            StoreError: if it could not be written, or not in time.
            CommunicatorError: if a rank has failed, or has not written in time; the message names it. With a backend of
                torch, an error of torch that may not name it.
        """
        if self._writing is None:
            return
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        # A store's own timeout, which ends the writing, is a TimeoutError too.
        if futures.wait([self._writing], timeout_s + _REPORT_TIMEOUT_S).not_done:
            raise StoreError(
                f"A checkpoint was still being written to {self._folder.url} after {timeout_s:g} s. {self._advice}"
            )
        writing, self._writing = self._writing, None
        writing.result()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the last checkpoint, and end the thread and the process group.

        Args:
            timeout_s: seconds to wait for the checkpoint; the constructor's if None.

        Raises:
            StoreError: if the checkpoint could not be written, or not in time.
        """
        try:
            self.wait(timeout_s)
        except BaseException as error:
            self._abandon(error, 0.0)
            raise
        self._threads.stop()
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon(error, _FAILURE_TIMEOUT_S)

    def _abandon(self, error: BaseException | None, timeout_s: float) -> None:
        """End without the other ranks, which may have failed or may be waiting for this one."""
        self._threads.stop()
        if self._writing is not None:
            with suppress(Exception):  # the error that ends training is the one to raise
                self._writing.result(timeout_s)
        if isinstance(self.group, SparkdlProcessGroup):
            self.group.abort(f"{type(error).__name__}: {error}" if error is not None else None)
        self._writing = self.group = None
