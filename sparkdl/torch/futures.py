"""Completes the futures of works, and runs their callbacks, on threads of the process group."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Work

from sparkdl.collective.watch import Watch
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.torch.work import UnawaitedWorks, wait_for_outputs

logger = logging.getLogger(__name__)


class FutureCompleter:
    """Completes futures of works, and thereby runs their callbacks, on threads that start with the first future.

    Futures complete in the order in which they were requested, which is that of the collectives of one process group.
    Their callbacks run one after another, so that collectives which they start begin in the same order on all ranks.

    * A callback may request further futures and wait for them. A separate thread completes these futures, before the
      next callback begins.
    * A callback may wait for anything else, such as a future that completes after its own, also by polling. If it has
      slept for a while, or has not returned within the process group's timeout, another thread continues with the
      futures that follow. Two callbacks run at the same time only in this case.

    A callback runs on the thread that attaches it if the future is already complete, else on a thread of this class.
    The order of its collectives among those of other threads therefore differs between ranks: a program whose callbacks
    start collectives on this process group must not start others meanwhile.

    Args:
        name: name of the threads.
        timeout_s: seconds after which no callback is waited for any longer: the timeout of the process group.
        in_order: whether the works complete in the order in which their futures are requested. Otherwise a future
            completes as soon as its own work does.

    Attributes:
        failure: first error of any work of the process group, or None.
        unawaited: works that were dropped before anything waited for them.
    """

    def __init__(self, name: str, *, timeout_s: float, in_order: bool = True) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._in_order = in_order
        self._lock = threading.RLock()  # works are dropped anywhere; see UnawaitedWorks
        self._line: _Line | None = None
        self._lines: set[_Line] = set()
        self._is_closed = False
        self.failure: Exception | None = None
        self.unawaited = UnawaitedWorks()

    def future_of(
        self, work: Work, source: torch.futures.Future[Any] | None = None
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that takes the outputs or the error of ``work`` as soon as it has them.

        Args:
            work: work that is complete or in progress.
            source: new future from which to derive it; None for one whose values are on the CPU.
        """
        source = torch.futures.Future() if source is None else source
        # Only a callback of `then` can give C++ waiters an error: `set_exception` is seen by Python waiters
        # alone, and the reducer of DistributedDataParallel would take the exception object for its tensors.
        future = source.then(partial(wait_for_outputs, work))
        if work.is_completed():
            source.set_result(None)
        else:
            self.submit(work, source)
        return future

    def close(self, timeout_s: float) -> None:
        """End the threads once every requested future is complete.

        Args:
            timeout_s: longest time for callbacks, in seconds; a thread that is still in a callback then is left behind.
        """
        with self._lock:
            self._is_closed = True
            lines, self._lines, self._line = self._lines, set(), None
        self.unawaited.close()
        deadline = Deadline(timeout_s)
        for line in lines:
            line.close()
        for line in lines:
            line.join(deadline)

    def submit(self, work: Work, source: torch.futures.Future[Any]) -> None:
        """Complete a future after a work, on a thread; at once if this completer is closed."""
        line = self._line_of_this_thread()
        if line is None:
            _complete(work, source)
        elif self._in_order:
            line.put(work, source)
        else:
            message: Any = work  # only messages complete in no order
            message.when_done(lambda: line.put(work, source))

    def _line_of_this_thread(self) -> _Line | None:
        """The line that completes the futures that this thread requests; None once this completer is closed."""
        below: dict[FutureCompleter, _Line] | None = getattr(_running, "lines", None)
        line = self._line if below is None else below.get(self)
        if line is None:
            with self._lock:
                line = None if below is not None or self._is_closed else self._line
                if line is None and not self._is_closed:
                    line = _Line(self._name, self._timeout_s)
                    self._lines.add(line)
                    if below is None:
                        self._line = line
                    else:
                        below[self] = line
        return line


_running = threading.local()
"""Has ``lines`` on a thread that runs callbacks: by completer, the line for futures that the callbacks request."""

_LOOK_S = 0.2
"""Interval of the checks of a callback's thread. If the thread used no CPU time in it, the callback is waiting."""

_DROWSY_LOOKS = 10
_DROWSY_SHARE = 0.1
"""A callback that polls is waiting, too: in this number of successive checks, its thread used less than this share of
the time and slept for more than this share. A thread that computes on a busy machine waits for a CPU and does not
sleep; a thread that competes with others for the GIL gets a larger share."""

_DRAINED_S = 10.0
"""How long to wait for the end of a thread that has no more work."""

_MAX_THREADS = 1000
"""Limit of the callbacks per line that wait for later futures."""


class _ThreadTimes(NamedTuple):
    """Times at a look, in seconds."""

    wall_s: float
    used_s: float
    """Time in which the thread has run."""
    queued_s: float
    """Time in which it has waited for a processor; NaN where the system does not report it."""


class _ThreadClock:
    """Reads the times of the thread that made it, from any thread."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._statistics = f"/proc/self/task/{threading.get_native_id()}/schedstat"

    def read(self) -> _ThreadTimes:
        """Return the times.

        Raises:
            OSError: if the thread has ended.
        """
        wall_s, used_s, queued_s = time.monotonic(), time.clock_gettime(self._clock), math.nan
        with contextlib.suppress(FileNotFoundError):
            queued_s = int(Path(self._statistics).read_text().split()[1]) * 1e-9
        return _ThreadTimes(wall_s, used_s, queued_s)


class _Line:
    """Futures that complete one after another, and the thread that completes them."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._queue: SimpleQueue[tuple[Work, torch.futures.Future[Any]] | threading.Event | None] = (
            SimpleQueue()
        )
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._owner: threading.Thread | None = None
        self._is_closed = False
        self._num_callbacks = 0
        self._clock: _ThreadClock | None = None
        """Clock of the owner, while it runs callbacks."""
        self._seen: tuple[int, _ThreadTimes] | None = None
        self._first_seen_s = 0.0
        self._num_drowsy = 0
        self.is_drained = True

    def put(self, work: Work, source: torch.futures.Future[Any]) -> None:
        """Complete ``source`` after ``work``; at once, on this thread, if the line is closed."""
        with self._lock:
            if not self._is_closed:
                if self._owner is None:
                    _watch.add(self)
                    self._start()
                self.is_drained = False
                self._queue.put((work, source))
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
                now = clock.read()
            except OSError:  # the thread has ended meanwhile
                return True
            if self._is_waiting(now) and len(self._threads) < _MAX_THREADS:
                seen, self._seen, self._clock = self._seen, None, None
                try:
                    self._start()
                except RuntimeError as error:
                    # The process may have no more threads now: the next look tries again.
                    logger.debug("No other thread can take over from a callback of %s: %s", self._name, error)
                    self._seen, self._clock = seen, clock
            return True

    def _is_waiting(self, now: _ThreadTimes) -> bool:
        """Whether the running callback is blocked itself, so that another thread should run the next ones."""
        before, self._seen = self._seen, (self._num_callbacks, now)
        if before is None or before[0] != self._num_callbacks:
            self._first_seen_s, self._num_drowsy = now.wall_s, 0
            return False
        elapsed_s, used_s, queued_s = (new - old for new, old in zip(now, before[1], strict=True))
        slept_s = elapsed_s - used_s - queued_s
        is_drowsy = used_s < _DROWSY_SHARE * elapsed_s < slept_s  # false if queued_s is NaN
        self._num_drowsy = self._num_drowsy + 1 if is_drowsy else 0
        return (
            used_s == 0
            or self._num_drowsy >= _DROWSY_LOOKS
            or now.wall_s - self._first_seen_s > self._timeout_s
        )

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()  # it owns the line only if it could start
        self._owner = thread
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _run(self) -> None:
        lines: dict[FutureCompleter, _Line] = {}
        _running.lines = lines
        me = threading.current_thread()
        clock = _ThreadClock()
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
            with completer._lock:
                completer._lines.discard(line)
            line.close()
            line.join(Deadline(_DRAINED_S))


def _complete(work: Work, source: torch.futures.Future[Any]) -> None:
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
    """Watches all lines of this process, by one thread while there are any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lines: set[_Line] = set()
        self._watch: Watch | None = None

    def add(self, line: _Line) -> None:
        """Watch a line."""
        with self._lock:
            self._lines.add(line)
            if self._watch is None:
                self._watch = Watch(self._look, name="sparkdl-futures-watch", pause_s=_LOOK_S)

    def notify(self) -> None:
        """Wake the thread: a line has work."""
        watch = self._watch
        if watch is not None:
            watch.wake()

    def remove(self, line: _Line) -> None:
        """Stop watching a line."""
        with self._lock:
            self._lines.discard(line)
            if self._lines or self._watch is None:
                return
            watch, self._watch = self._watch, None
        watch.close()

    def _look(self) -> bool:
        with self._lock:
            lines = list(self._lines)
        busy = [
            line.look() for line in lines
        ]  # all of them: ``any`` over a generator would stop at the first
        return any(busy)


_watch = _LineWatch()
