"""What a collective returns to torch: a ``Work`` over the communicator's handles, and futures of it.

Runs on the *rank*. Waiting on a ``Work`` waits on the handle on the caller's own thread. A future has nobody
who waits in Python, as in the reducer of ``DistributedDataParallel``, so one thread per process group
completes those.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.collective import Handle

_NO_TIMEOUT = timedelta(0)


class CompletedWork(Work):
    """A collective that was complete, and well, before its call returned."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  # c10d's signature
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It is."""
        return True

    def exception(self) -> Exception | None:
        """None."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """Return at once."""

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A complete future of the output tensors."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


class CollectiveWork(Work):
    """A collective under way.

    The ``finishes`` run once, after the last handle completed and before anyone sees the result: they copy
    out of staging buffers. They must not call collectives.
    """

    # With hundreds of works queued, cache misses take most of the time to make one; a dict would add a fifth.
    __slots__ = (
        "_completer",
        "_failure",
        "_finish_lock",
        "_finishes",
        "_future",
        "_handles",
        "_outputs",
        "_sender",
    )

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        handles: Sequence[Handle],
        completer: FutureCompleter,
        finishes: Sequence[Callable[[], None]] = (),
        source_rank: int = -1,
    ) -> None:
        Work.__init__(self)  # super() would be a quarter of what this takes
        self._outputs = outputs
        self._handles = handles
        self._completer = completer
        self._finishes = finishes
        self._finish_lock = threading.Lock() if finishes else None
        self._failure: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._sender = source_rank

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs hold the result.

        Args:
            timeout: how long to wait at most; None or zero is as long as the operation's own deadline.

        Raises:
            CommunicatorError: if the collective failed; the subclass says how.
        """
        timeout_s = None if timeout is None else seconds(timeout)
        try:
            for handle in self._handles:
                handle.wait(timeout_s)
            if self._finish_lock is not None:
                self._finish_once(self._finish_lock)
        except Exception as error:
            if self.is_completed():  # else it was only this wait that ran out of time
                self._failure = error
                self._completer.failure = self._completer.failure or error
            raise
        return True

    def is_completed(self) -> bool:
        """The collective is complete or has failed; ``wait`` would not block."""
        return all(handle.done() for handle in self._handles)

    def is_success(self) -> bool:
        """The collective is complete and did not fail."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The collective's error once it has failed, else None."""
        if self._failure is None and self.is_completed():
            try:
                self.wait()
            except Exception as error:
                return error
        return self._failure

    def result(self) -> list[torch.Tensor]:
        """The output tensors; wait first."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """The same as ``wait``: tensors on the CPU have no stream to order."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors; it holds this work, and so the buffers, until it is complete.

        A failure arrives through it as a ``RuntimeError`` that quotes ours: c10d's futures keep only the
        text. See :func:`sparkdl.torch.collective_errors`.
        """
        if self._future is None:
            self._future = self._completer.future_of(self)
        return self._future

    def _source_rank(self) -> int:
        """Who sent what a ``recv`` received; -1 for what is no ``recv``."""
        return self._sender

    def _finish_once(self, lock: threading.Lock) -> None:
        with lock:
            finishes, self._finishes = self._finishes, ()
            for finish in finishes:
                finish()


class _WorkHandle:
    """A work as a handle of another."""

    def __init__(self, work: CollectiveWork) -> None:
        self._work = work

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(None if timeout_s is None else timedelta(seconds=timeout_s))

    def done(self) -> bool:
        return self._work.is_completed()


def joined(works: Sequence[CollectiveWork], *, completer: FutureCompleter) -> CollectiveWork | CompletedWork:
    """Several works as one."""
    outputs = [output for work in works for output in work.result()]
    if not works:
        return CompletedWork(outputs)
    return CollectiveWork(outputs, [_WorkHandle(work) for work in works], completer)


class FutureCompleter:
    """Completes futures in the order in which they were asked for, on one thread that starts with the first.

    Collectives of one process group complete in the order of submission, so waiting for them one after
    another delays none of them.

    Attributes:
        failure: the first error that any work of the process group had.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None

    def future_of(self, work: CollectiveWork) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that takes the outputs or the error of ``work`` as soon as it has them."""
        source: torch.futures.Future[None] = torch.futures.Future()

        def outputs_of_work(_: torch.futures.Future[None]) -> list[torch.Tensor]:
            work.wait()
            return work.result()

        # Only a callback of `then` can give C++ waiters an error: `set_exception` is seen by Python waiters
        # alone, and the reducer of DistributedDataParallel would take the exception object for its tensors.
        future = source.then(outputs_of_work)
        if work.is_completed():
            source.set_result(None)
        else:
            self._submit(lambda: source.set_result(None))
        return future

    def close(self) -> None:
        """End the thread once every future asked for is complete."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _submit(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(task)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()


def seconds(timeout: timedelta | None) -> float | None:
    """A c10d timeout in seconds, or None where it is zero or negative, by which c10d means "the default"."""
    if timeout is None or timeout <= _NO_TIMEOUT:
        return None
    return timeout.total_seconds()
