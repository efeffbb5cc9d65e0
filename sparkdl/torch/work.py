"""The ``Work`` that a collective returns to torch, over the communicator's handles, and its futures.

Runs on the *rank*. Waiting on a ``Work`` waits on the handle on the caller's own thread. Futures are often waited for
in C++, as in the reducer of ``DistributedDataParallel``, so threads of the process group complete them; see
:class:`FutureCompleter`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from sparkdl.rendezvous.deadline import Deadline, to_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.collective import Handle

logger = logging.getLogger(__name__)

_NO_TIMEOUT = timedelta(0)


class UnawaitedWorks:
    """Works that were dropped before anything waited for them, kept because C++ may still wait for them.

    torch finds the methods of a ``Work`` that is written in Python through its Python object, but does not keep this
    object alive: once it is gone, ``wait`` in C++ waits for a condition that is never signalled.
    ``DistributedDataParallel`` under ``join`` passes a work to its reducer and drops it. C++ does not report when it
    drops its own reference, so the oldest works are dropped when there are too many.
    """

    MAX_WORKS = 1000
    MAX_BYTES = 16 << 20

    def __init__(self) -> None:
        # Works are dropped anywhere, also by the garbage collector while the same thread holds this lock.
        self._lock = threading.RLock()
        self._works: deque[tuple[CollectiveWork, int]] = deque()
        self._num_bytes = 0
        self._is_closed = False

    def keep(self, work: CollectiveWork) -> None:
        """Keep a work, and with it its outputs."""
        num_bytes = sum(output.nbytes for output in work.result())
        given_up = []
        with self._lock:
            if self._is_closed:
                return
            self._works.append((work, num_bytes))
            self._num_bytes += num_bytes
            while len(self._works) > 1 and (
                len(self._works) > self.MAX_WORKS or self._num_bytes > self.MAX_BYTES
            ):
                given_up.append(self._works.popleft())
                self._num_bytes -= given_up[-1][1]

    def close(self) -> None:
        """Drop all works, and keep no more."""
        with self._lock:
            self._is_closed = True
            works, self._works = self._works, deque()
        works.clear()


class CompletedWork(Work):
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

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> Exception | None:
        """None: the collective has not failed."""
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

    def is_success(self) -> bool:
        """Whether the collective is complete and did not fail."""
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

        Callbacks of the future run on a thread of the process group; see :class:`FutureCompleter` for their order. The
        future reports a failure as a ``RuntimeError`` that quotes sparkdl's error: c10d's futures keep only the text.
        See :func:`sparkdl.torch.collective_errors`.
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
                self._completer.finish_alone(self)

    def _finish_once(self, lock: threading.Lock) -> None:
        with lock:
            finishes, self._finishes = self._finishes, ()
            for finish in finishes:
                finish()


class _WorkHandle:
    """A work, used as a handle of another work."""

    def __init__(self, work: CollectiveWork) -> None:
        self._work = work

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(None if timeout_s is None else timedelta(seconds=timeout_s))

    def done(self) -> bool:
        return self._work.is_completed()


def joined(works: Sequence[CollectiveWork], *, completer: FutureCompleter) -> CollectiveWork:
    """Several works as one."""
    outputs = [output for work in works for output in work.result()]
    return CollectiveWork(outputs, [_WorkHandle(work) for work in works], completer)


class Awaitable(Protocol):
    """The methods of a work that :class:`FutureCompleter` uses."""

    def wait(self) -> bool:
        """Wait until the work is complete; raise its error if it has failed."""

    def is_completed(self) -> bool:
        """Whether ``wait`` would not block."""

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""


class FutureCompleter:
    """Completes futures of works, and thereby runs their callbacks, on threads that start with the first future.

    Futures complete in the order in which they were requested, which is that of the collectives of one process group.
    Their callbacks run one after another, so that collectives which they start begin in the same order on all ranks.

    * A callback may request further futures and wait for them. Another thread completes the futures that are requested
      on a thread that runs callbacks, before that thread's next callback begins.
    * A callback may wait for anything else, such as a future that comes later. If it has not run for a while, another
      thread continues with the futures that follow; only then do two callbacks run at the same time.

    A callback runs on the thread that attaches it if the future is already complete, else on a thread of this class.
    The order of its collectives among those of other threads therefore differs between ranks: a program whose callbacks
    start collectives on this process group must not start others meanwhile.

    Args:
        name: name of the threads.
        in_order: whether the works complete in the order in which their futures are requested. Otherwise a future
            completes as soon as its own work does.

    Attributes:
        failure: first error of any work of the process group, or None.
        unawaited: works that were dropped before anything waited for them.
    """

    def __init__(self, name: str, *, in_order: bool = True) -> None:
        self._name = name
        self._in_order = in_order
        self._lock = threading.RLock()  # works are dropped anywhere; see UnawaitedWorks
        self._line: _Line | None = None
        self._lines: set[_Line] = set()
        self._is_closed = False
        self.failure: Exception | None = None
        self.unawaited = UnawaitedWorks()

    def future_of(
        self, work: Awaitable, source: torch.futures.Future[Any] | None = None
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that takes the outputs or the error of ``work`` as soon as it has them.

        Args:
            work: work that is complete or in progress.
            source: new future from which to derive it; None for one whose values are on the CPU.
        """
        source = torch.futures.Future() if source is None else source

        def outputs_of_work(_: torch.futures.Future[Any]) -> list[torch.Tensor]:
            work.wait()
            return work.result()

        # Only a callback of `then` can give C++ waiters an error: `set_exception` is seen by Python waiters
        # alone, and the reducer of DistributedDataParallel would take the exception object for its tensors.
        future = source.then(outputs_of_work)
        if work.is_completed():
            source.set_result(None)
        else:
            self._submit(work, source)
        return future

    def finish_alone(self, work: Awaitable) -> None:
        """Complete a work that the caller has dropped, so that its results are written."""
        self._submit(work, torch.futures.Future())

    def close(self, timeout_s: float) -> None:
        """End the threads once every requested future is complete.

        Args:
            timeout_s: longest time for callbacks, in seconds; a thread that is still in a callback then is left behind.
        """
        self.unawaited.close()
        with self._lock:
            self._is_closed = True
            lines, self._lines, self._line = self._lines, set(), None
        deadline = Deadline(timeout_s)
        for line in lines:
            line.close()
        for line in lines:
            line.join(deadline)

    def _submit(self, work: Awaitable, source: torch.futures.Future[Any]) -> None:
        line = self._line_of_this_thread()
        if line is None:
            _complete(work, source)
        elif self._in_order:
            line.put(work, source)
        else:
            assert isinstance(work, CollectiveWork), "only messages complete in no order"
            work.when_done(lambda: line.put(work, source))

    def _line_of_this_thread(self) -> _Line | None:
        """The line that completes the futures that this thread requests; None once this completer is closed."""
        below: dict[FutureCompleter, _Line] | None = getattr(_running, "lines", None)
        line = self._line if below is None else below.get(self)
        if line is None:
            with self._lock:
                line = None if below is not None or self._is_closed else self._line
                if line is None and not self._is_closed:
                    line = _Line(self._name)
                    self._lines.add(line)
                    if below is None:
                        self._line = line
                    else:
                        below[self] = line
        return line

    def _forget(self, line: _Line) -> None:
        with self._lock:
            self._lines.discard(line)


_running = threading.local()
"""Has ``lines`` on a thread that runs callbacks: by completer, the line for futures that the callbacks request."""

_LOOK_S = 0.2
"""A callback whose thread has used no processor time for so long counts as waiting."""

_DRAINED_S = 10.0
"""How long to wait for the end of a thread that has no more work."""

_MAX_THREADS = 64
"""Limit of the callbacks per line that wait for later futures."""


class _Line:
    """Futures that complete one after another, and the thread that completes them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Awaitable, torch.futures.Future[Any]] | threading.Event | None] = (
            SimpleQueue()
        )
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._owner: threading.Thread | None = None
        self._is_closed = False
        self._num_callbacks = 0
        self._clock: int | None = None
        """Clock of the owner's processor time, while it runs callbacks."""
        self._seen: tuple[int, int] | None = None
        self.is_drained = True

    def put(self, work: Awaitable, source: torch.futures.Future[Any]) -> None:
        """Complete ``source`` after ``work``; at once, on this thread, if the line is closed."""
        with self._lock:
            if not self._is_closed:
                self.is_drained = False
                self._queue.put((work, source))
                if self._owner is None:
                    self._start()
                    _watch.add(self)
                _watch.notify()
                return
        _complete(work, source)

    def drain(self) -> None:
        """Wait until all futures that were put are complete."""
        if not self.is_drained:
            self.is_drained = True
            done = threading.Event()
            self._queue.put(done)
            done.wait()

    def close(self) -> None:
        """End the thread once all futures that were put are complete; returns at once."""
        with self._lock:
            self._is_closed = True
            if self._owner is not None:
                self._queue.put(None)

    def join(self, deadline: Deadline) -> None:
        """Wait until the threads have ended."""
        while True:
            with self._lock:
                threads = [
                    thread
                    for thread in self._threads
                    if thread.is_alive() and thread is not threading.current_thread()
                ]
            if not threads or deadline.expired:
                break
            threads[0].join(deadline.remaining_s())
        _watch.remove(self)
        if threads:
            logger.warning(
                "A callback of a future of %s has not returned within %g s: its thread is left behind. Look at"
                " what it waits for.",
                self._name,
                deadline.timeout_s,
            )

    def look(self) -> bool:
        """Let another thread take over from one that waits in a callback; return whether the line is in use."""
        with self._lock:
            clock = self._clock
            if clock is None or self._queue.empty():
                self._seen = None
                return clock is not None or not self._queue.empty()
            try:
                now = (self._num_callbacks, time.clock_gettime_ns(clock))
            except OSError:  # the thread has ended meanwhile
                return True
            if now != self._seen:
                self._seen = now
            elif len(self._threads) < _MAX_THREADS:
                self._seen = self._clock = None
                self._start()
            return True

    def _start(self) -> None:
        self._owner = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(self._owner)
        self._owner.start()

    def _run(self) -> None:
        lines: dict[FutureCompleter, _Line] = {}
        _running.lines = lines
        me = threading.current_thread()
        clock = time.pthread_getcpuclockid(threading.get_ident())
        while (task := self._queue.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
                continue
            work, source = task
            with contextlib.suppress(Exception):  # the future's callback raises it again
                work.wait()
            self._num_callbacks += 1
            self._clock = clock
            _set(source)
            for line in lines.values():
                line.drain()
            del task, work, source
            with self._lock:
                if self._owner is not me:
                    break
                self._clock = None
        for completer, line in lines.items():
            completer._forget(line)
            line.close()
            line.join(Deadline(_DRAINED_S))


def _complete(work: Awaitable, source: torch.futures.Future[Any]) -> None:
    """Complete a future on this thread."""
    with contextlib.suppress(Exception):
        work.wait()
    _set(source)


def _set(source: torch.futures.Future[Any]) -> None:
    """Set a future and run its callbacks; their errors are in the futures that `then` returned."""
    try:
        source.set_result(None)
    except Exception:  # the thread has other futures to complete
        logger.exception("A callback of a future failed.")


class _LineWatch:
    """The thread that watches all lines of this process, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lines: set[_Line] = set()
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._end = threading.Event()

    def add(self, line: _Line) -> None:
        """Watch a line."""
        with self._lock:
            self._lines.add(line)
            if self._thread is None:
                self._end = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._end,), name="sparkdl-futures-watch", daemon=True
                )
                self._thread.start()

    def notify(self) -> None:
        """Wake the thread: a line has work."""
        if not self._news.is_set():
            self._news.set()

    def remove(self, line: _Line) -> None:
        """Stop watching a line."""
        with self._lock:
            self._lines.discard(line)
            if self._lines or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._end.set()
            self._news.set()
        thread.join()

    def _run(self, end: threading.Event) -> None:
        while not end.wait(_LOOK_S):
            self._news.wait()
            self._news.clear()
            with self._lock:
                lines = list(self._lines)
            busy = [
                line.look() for line in lines
            ]  # all of them: ``any`` over a generator would stop at the first
            if any(busy):
                self._news.set()


_watch = _LineWatch()


def seconds(timeout: timedelta | None) -> float | None:
    """A c10d timeout in seconds; None if it is zero or negative, by which c10d means "the default"."""
    if timeout is None or timeout <= _NO_TIMEOUT:
        return None
    return to_seconds(timeout)
