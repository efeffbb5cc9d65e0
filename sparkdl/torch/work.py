"""The ``Work`` that a collective returns to torch, over the communicator's handles.

Waiting on a ``Work`` waits on the handle on the caller's own thread. Futures are often waited for in C++, as in the
reducer of ``DistributedDataParallel``, so threads of the process group complete them; see :mod:`sparkdl.torch.futures`.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from sparkdl.rendezvous.deadline import to_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.collective import Handle
    from sparkdl.torch.futures import FutureCompleter

_NO_TIMEOUT = timedelta(0)


class UnawaitedWorks:
    """Works that were dropped before anything waited for them, kept because C++ may still wait for them.

    torch finds the methods of a ``Work`` that is written in Python through its Python object, but does not keep this
    object alive: once it is gone, ``wait`` in C++ waits for a condition that is never signalled.
    ``DistributedDataParallel`` under ``join`` passes a work to its reducer and drops it. C++ does not report when it
    drops its own reference. So large outputs are released when there are too many bytes and their works are complete,
    and the oldest works are dropped when there are too many of them.
    """

    MAX_WORKS = 20_000
    MAX_BYTES = 16 << 20
    SMALL_BYTES = 1024
    """Outputs up to this size are kept with their work: the reducer reads those of the work that it waits for."""

    def __init__(self) -> None:
        # Works are dropped anywhere, also by the garbage collector while the same thread holds this lock.
        self._lock = threading.RLock()
        self._works: deque[KeptWork | CollectiveWork] = deque()
        self._large: deque[tuple[KeptWork | CollectiveWork, int]] = deque()
        self._num_bytes = 0
        self._is_releasing = False
        self._is_closed = False

    def keep(self, work: KeptWork | CollectiveWork) -> None:
        """Keep a work, and its outputs as long as there is room."""
        num_bytes = sum(output.nbytes for output in work.result())
        given_up = []
        with self._lock:
            if self._is_closed:
                return
            self._works.append(work)
            if num_bytes > self.SMALL_BYTES:
                self._large.append((work, num_bytes))
                self._num_bytes += num_bytes
            while len(self._works) > self.MAX_WORKS:
                given_up.append(self._works.popleft())
        self._release_outputs()

    def _release_outputs(self) -> None:
        """Release the outputs of the oldest works that are complete, until there is room."""
        with self._lock:
            # Not twice at a time: the garbage collector may drop other works while one is finished here.
            if self._is_releasing or self._num_bytes <= self.MAX_BYTES:
                return
            self._is_releasing = True
            candidates = list(self._large)
        released = set()
        excess = sum(num_bytes for _, num_bytes in candidates) - self.MAX_BYTES
        for work, num_bytes in candidates:
            if excess > 0 and work.release():
                released.add(id(work))
                excess -= num_bytes
        with self._lock:
            self._is_releasing = False
            self._large = deque(entry for entry in self._large if id(entry[0]) not in released)
            self._num_bytes = sum(num_bytes for _, num_bytes in self._large)

    def close(self) -> None:
        """Drop all works, and keep no more."""
        with self._lock:
            self._is_closed = True
            kept = (self._works, self._large)
            self._works, self._large = deque(), deque()
        for queue in kept:
            queue.clear()


class OwnWork(Work):
    """A work of a process group of sparkdl; subclasses say whether it is completed, and how it failed."""

    __slots__ = ()

    _outputs: Sequence[torch.Tensor]

    def is_success(self) -> bool:
        """Whether the work is over and has not failed."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output tensors; wait first."""
        return list(self._outputs)


def wait_for_outputs(work: Work, _: torch.futures.Future[Any]) -> list[torch.Tensor]:
    """Wait for a work, and return its outputs: a callback of a future that completes with the work or after it."""
    work.wait()
    return work.result()


class KeptWork(OwnWork):
    """A work of a backend for GPUs, whose Python object lives as long as C++ may call its methods.

    Attributes:
        is_awaited: whether ``wait`` has returned its result or error; the work can be dropped then.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], unawaited: UnawaitedWorks) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._unawaited = unawaited
        self.is_awaited = False

    def release(self) -> bool:
        """Drop the outputs if the work is complete; return whether they were dropped."""
        if not self.is_completed():
            return False
        self._outputs = []
        return True

    def __del__(self) -> None:
        if not self.is_awaited:
            self._unawaited.keep(self)


class CompletedWork(OwnWork):
    """A collective that completed successfully before its call returned."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  # c10d's signature
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def exception(self) -> Exception | None:
        """None: the collective has not failed."""
        return None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A complete future of the output tensors."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


class CollectiveWork(OwnWork):
    """A collective in progress, whose Python object lives as long as C++ may call its methods.

    The ``finishes`` run once, after the last handle has completed and before the result is available: they copy out of
    staging buffers. They must not call collectives.

    Attributes:
        is_awaited: whether ``wait`` has returned its result or error; the work can be dropped then.
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
        "_unawaited",
        "is_awaited",
    )

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        handles: Sequence[Handle],
        completer: FutureCompleter,
        finishes: Sequence[Callable[[], None]] = (),
        sender: Callable[[], int] | None = None,
    ) -> None:
        Work.__init__(self)  # super() would take a quarter of the time to make a work
        self.is_awaited = False
        self._unawaited = completer.unawaited
        self._outputs = outputs
        self._handles = handles
        self._completer = completer
        self._finishes = finishes
        self._finish_lock = threading.Lock() if finishes else None
        self._failure: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._sender = sender

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs hold the result.

        Args:
            timeout: longest time to wait; None or zero for the operation's own deadline.

        Raises:
            CommunicatorError: if the collective failed; the subclass says how.
        """
        if profiler._is_profiler_enabled and not self.is_awaited:
            with _RecordFunctionFast("sparkdl:wait"):
                return self._wait(timeout)
        return self._wait(timeout)

    def _wait(self, timeout: timedelta | None) -> bool:
        timeout_s = None if timeout is None else seconds(timeout)
        try:
            if self._failure is not None and not self._handles:
                raise self._failure
            for handle in self._handles:
                handle.wait(timeout_s)
            if self._finish_lock is not None:
                self._finish_once(self._finish_lock)
        except Exception as error:
            if self.is_completed():  # else only this wait has timed out
                self._failure = error
                self._completer.failure = self._completer.failure or error
                self.is_awaited = True
            raise
        self.is_awaited = True
        return True

    def is_completed(self) -> bool:
        """Whether the collective is complete or has failed, so that ``wait`` would not block."""
        return all(handle.done() for handle in self._handles)

    def exception(self) -> Exception | None:
        """The collective's error once it has failed, else None."""
        if self._failure is None and self.is_completed():
            try:
                self.wait()
            except Exception as error:
                return error
        return self._failure

    def release(self) -> bool:
        """Drop the outputs if the work is complete and no thread is finishing it; return whether they were dropped.

        The work can still be waited for; ``result`` is empty then.
        """
        if not self.is_completed() or not (
            self._finish_lock is None or self._finish_lock.acquire(blocking=False)
        ):
            return False
        try:
            for handle in self._handles:
                handle.wait()
            for finish in self._finishes:
                finish()
        except Exception as error:  # `wait` raises it again
            self._failure = error
        finally:
            self._outputs = self._handles = self._finishes = ()
            if self._finish_lock is not None:
                self._finish_lock.release()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors; it holds this work, and so the buffers, until it is complete.

        Callbacks of the future run on a thread of the process group; for their order see
        :class:`~sparkdl.torch.futures.FutureCompleter`. The future reports a failure as a ``RuntimeError`` that quotes
        sparkdl's error: c10d's futures keep only the text. See :func:`sparkdl.torch.collective_errors`.
        """
        if self._future is None:
            self._future = self._completer.future_of(self)
        return self._future

    def when_done(self, action: Callable[[], None]) -> None:
        """Call ``action``, on any thread, as soon as a message is complete; it must return at once."""
        (handle,) = self._handles
        handle.when_done(action)  # type: ignore[attr-defined]  # the handles of messages have it

    def _source_rank(self) -> int:
        """The rank that sent the message of a completed ``recv``; -1 for any other operation."""
        return -1 if self._sender is None else self._sender()

    source_rank = _source_rank

    def __del__(self) -> None:
        if not self.is_awaited:
            self._unawaited.keep(self)
            if self._finishes:
                # So that its outputs are still written.
                self._completer.submit(self, torch.futures.Future())

    def _finish_once(self, lock: threading.Lock) -> None:
        with lock:
            finishes, self._finishes = self._finishes, ()
            for finish in finishes:
                finish()


class JoinedWork(OwnWork):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all works; the timeout is that of each."""
        return all(work.wait(_NO_TIMEOUT if timeout is None else timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all works are over."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Any:
        """The error of the first work that has failed, else None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The output tensors of all works; wait first."""
        return [output for work in self._works for output in work.result()]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors, or of the first error."""
        together = torch.futures.collect_all([work.get_future() for work in self._works])
        return together.then(partial(wait_for_outputs, self))


def seconds(timeout: timedelta | None) -> float | None:
    """A c10d timeout in seconds; None if it is zero or negative, c10d's "default"."""
    if timeout is None or timeout <= _NO_TIMEOUT:
        return None
    return to_seconds(timeout)
