"""The collectives and messages of c10d for CUDA tensors through host memory.

Host memory is for ranks that share a GPU, which NCCL refuses. Tensors are copied to pinned memory, communicated there
as CPU tensors are (through shared memory, on one host), and copied back. The copies are in the order of the caller's
stream; a thread of the process group waits for them on the host, so that neither the caller nor its stream waits
before ``wait``. Collectives follow each other on one thread. Messages start on another one, in their order, and end
whenever their peer takes them: two ranks may both send before they receive, and no message waits for a collective.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.torch.futures import FutureCompleter
from sparkdl.torch.submission import OwnAccelerator, tensors_in
from sparkdl.torch.work import JoinedWork, KeptWork, seconds

if TYPE_CHECKING:
    from sparkdl.torch.gpu.lanes import GpuLane
    from sparkdl.torch.process_group import SparkdlProcessGroup


Nested = Any
"""A tensor, or lists of them to any depth, as c10d's methods take them."""


class StagedWork(KeptWork):
    """A collective in progress in host memory.

    ``wait`` makes the host wait until the collective is over, and the caller's stream until its results are copied.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], lane: GpuLane, completer: FutureCompleter) -> None:
        super().__init__(outputs, completer.unawaited)
        self._lane = lane
        self._completer = completer
        self._over = threading.Event()
        self._mark: Any = None
        self._failure: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def end(self, mark: Any, failure: Exception | None) -> None:
        """Record the end of the collective: with a mark after the copies, or with a failure."""
        self._mark, self._failure = mark, failure
        self._over.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs hold the result, for the next work on the current stream.

        Raises:
            CommunicatorError: if the collective failed; the subclass says how.
        """
        return self._wait(Deadline(seconds(timeout) or math.inf))

    def _wait(self, deadline: Deadline) -> bool:
        if not self._over.wait(_none_if_endless(deadline)):
            raise CommunicatorTimeoutError(
                f"the operation is not over after {deadline.timeout_s:g} s; it continues and can be waited for again"
            )
        self.is_awaited = True
        if self._failure is not None:
            raise self._failure
        self._lane.join(self._mark)
        return True

    def is_completed(self) -> bool:
        """Whether the collective is over, successfully or not."""
        return self._over.is_set()

    def exception(self) -> Exception | None:
        """The collective's error once it has failed, else None."""
        return self._failure

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors, or of the error; see :class:`~sparkdl.torch.futures.FutureCompleter`."""
        if self._future is None:
            self._future = self._completer.future_of(self, self._lane.new_future())
        return self._future


class StagedMessage(StagedWork):
    """A message in progress in host memory, which any thread may finish once its host work is complete."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        lane: GpuLane,
        completer: FutureCompleter,
        finish: Callable[[Any], Any],
    ) -> None:
        super().__init__(outputs, lane, completer)
        self._is_started = threading.Event()
        self._host_work: Any = None
        self._finishing = threading.Lock()
        self._finish: Callable[[Any], Any] | None = finish
        self._noting = threading.Lock()
        self._actions: list[Callable[[], None]] = []

    def set_host_work(self, host_work: Any) -> None:
        """Record the host work of the message."""
        self._host_work = host_work
        self._is_started.set()

    def end(self, mark: Any, failure: Exception | None) -> None:
        """Record the end of the message, which may not have started."""
        with self._noting:
            super().end(mark, failure)
            actions, self._actions = self._actions, []
        self._is_started.set()
        for action in actions:
            action()

    def when_done(self, action: Callable[[], None]) -> None:
        """Call ``action``, on any thread, as soon as the message is over; it must return at once."""
        with self._noting:
            if not self._over.is_set():
                self._actions.append(action)
                return
        action()

    def finish(self) -> None:
        """Copy the received tensors to the device, after the host work; once."""
        with self._finishing:
            finish, self._finish = self._finish, None
            if finish is None:
                return
            try:
                mark, failure = finish(self._host_work), None
            except Exception as error:
                mark, failure = None, error
            self._host_work = None  # which holds the host's tensors
            self.end(mark, failure)

    def _wait(self, deadline: Deadline) -> bool:
        """This thread finishes the message if no other one has done so."""
        if self._is_started.wait(_none_if_endless(deadline)) and (host_work := self._host_work) is not None:
            left_s = _none_if_endless(deadline)
            try:  # zero would mean the message's own deadline
                host_work.wait(None if left_s is None else timedelta(seconds=max(left_s, 1e-3)))
            except Exception:
                if not host_work.is_completed():  # only this wait has timed out
                    raise
            self.finish()
        return super()._wait(deadline)


def _none_if_endless(deadline: Deadline) -> float | None:
    return None if deadline.timeout_s == math.inf else deadline.remaining_s()


class _Worker:
    """A thread that calls functions in the order in which they are given."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._putting = threading.Lock()
        self._is_ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        with self._putting:
            if self._is_ended:
                raise CommunicatorError("the process group is closed")
            self._queue.put(task)

    def end(self) -> None:
        """Carry out what was given and end the thread. May be called again."""
        with self._putting:
            self._is_ended = True
            self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task  # it holds tensors


def _make_staged(
    method: str, *, reads: Sequence[int] = (), writes: Sequence[int] = (), is_message: bool = False
) -> Callable[..., StagedWork]:
    """Make a method that runs the host group's method on twins of its tensors in host memory.

    Args:
        method: name of the host group's method.
        reads: positions of the arguments whose tensors are copied to the host first.
        writes: positions of the arguments whose tensors are copied back afterwards.
        is_message: whether the thread goes on to the next operation before this one is over.
    """

    def call(self: StagedAccelerator, *arguments: Any) -> StagedWork:
        return self._stage(method, reads, writes, arguments, is_message)

    call.__doc__ = f"c10d's ``{method}``, as the host group does it."
    return call


class StagedAccelerator(OwnAccelerator):
    """The accelerator of ranks that share a GPU: it copies tensors to host memory and back.

    Args:
        host_group: process group of the same ranks for CPU tensors, used for nothing else: its collectives run in the
            order of the calls here, independently of other communication of the ranks.
        lane: lane on which the copies run.
        name: name of the thread.

    Attributes:
        failure: first error of the communicator below, or None.
    """

    def __init__(self, host_group: SparkdlProcessGroup, lane: GpuLane, name: str) -> None:
        super().__init__()
        self._host_group = host_group
        self._lane = lane
        self.failure: CommunicatorError | None = None
        self._collectives = _Worker(f"sparkdl-staging-{name}")
        self._starts = _Worker(f"sparkdl-sending-{name}")
        self._finishes = _Worker(f"sparkdl-arriving-{name}")
        timeout_s = host_group.timeout_s
        self._completer = FutureCompleter(f"sparkdl-staged-futures-{name}", timeout_s=timeout_s)
        self._message_completer = FutureCompleter(
            f"sparkdl-staged-messages-{name}", timeout_s=timeout_s, in_order=False
        )

    allreduce = _make_staged("allreduce", reads=[0], writes=[0])
    allreduce_coalesced = _make_staged("allreduce_coalesced", reads=[0], writes=[0])
    reduce = _make_staged("reduce", reads=[0], writes=[0])
    broadcast = _make_staged("broadcast", reads=[0], writes=[0])
    allgather = _make_staged("allgather", reads=[1], writes=[0])
    allgather_coalesced = _make_staged("allgather_coalesced", reads=[1], writes=[0])
    allgather_into_tensor_coalesced = _make_staged("allgather_into_tensor_coalesced", reads=[1], writes=[0])
    reduce_scatter = _make_staged("reduce_scatter", reads=[1], writes=[0])
    reduce_scatter_tensor_coalesced = _make_staged("reduce_scatter_tensor_coalesced", reads=[1], writes=[0])
    gather = _make_staged("gather", reads=[1], writes=[0])
    scatter = _make_staged("scatter", reads=[1], writes=[0])
    alltoall = _make_staged("alltoall", reads=[1], writes=[0])
    alltoall_base = _make_staged("alltoall_base", reads=[1], writes=[0])
    send = _make_staged("send", reads=[0], is_message=True)
    recv = _make_staged("recv", writes=[0], is_message=True)

    def _end_coalescing(self, _: torch.device) -> JoinedWork | None:
        """All operations since :meth:`_start_coalescing` as one work; None if there was none."""
        works, self._coalesced.items = self._coalesced.items, None
        return JoinedWork(works) if works else None

    def abort(self) -> None:
        """Make every collective fail, here and on the other ranks."""
        self._host_group.abort()

    def shutdown(self) -> None:
        """Complete the operations in progress and close the host group."""
        self._end_threads()
        self._host_group.shutdown()
        self._finishes.end()
        for completer in (self._completer, self._message_completer):
            completer.close(self._host_group.timeout_s)

    def _end_threads(self) -> None:
        """Complete the collectives in progress and start all messages. May be called again."""
        self._collectives.end()
        self._starts.end()

    def _stage(
        self,
        method: str,
        reads: Sequence[int],
        writes: Sequence[int],
        arguments: Sequence[Any],
        is_message: bool,
    ) -> StagedWork:
        twins: dict[int, torch.Tensor] = {}
        given = [tensor for argument in arguments for tensor in tensors_in(argument)]
        read = [tensor for position in reads for tensor in tensors_in(arguments[position])]
        written = [tensor for position in writes for tensor in tensors_in(arguments[position])]
        with self._lane.beside(given, asynchronous=True):
            for tensor in given:
                twins[id(tensor)] = self._lane.host_twin(tensor)
            for tensor in read:
                twins[id(tensor)].copy_(tensor.detach(), non_blocking=True)
            copied = self._lane.mark()
        twin_arguments = [with_twins(argument, twins) for argument in arguments]

        def start() -> Any:
            self._lane.block(copied)
            return getattr(self._host_group, method)(*twin_arguments)

        def finish(host_work: Any) -> Any:
            host_work.wait()
            with self._lane.after(copied, written):
                for tensor in written:
                    tensor.detach().copy_(twins[id(tensor)], non_blocking=True)
                return self._lane.mark()

        if is_message:
            return self._submit_message(written, start, finish)
        return self._submit(written, arguments, lambda: finish(start()))

    def _submit(
        self, outputs: Sequence[torch.Tensor], arguments: Sequence[Any], communicate: Callable[[], Any]
    ) -> StagedWork:
        """Have a thread call ``communicate``, which returns a mark after its work on the lane's stream."""
        work = StagedWork(outputs, self._lane, self._completer)
        self._note(work)
        # A work that its caller drops before anything has waited for it must get to `UnawaitedWorks` then.
        reference = weakref.ref(work)

        def carry_out() -> None:
            mark, failure = None, None
            try:
                mark = communicate()
            except Exception as error:
                self._fail(error)
                failure = error
            if (kept := reference()) is not None:
                kept.end(mark, failure)

        self._collectives.put(carry_out)
        if not all(getattr(argument, "asyncOp", True) for argument in arguments):
            work.wait()
        return work

    def _submit_message(
        self, outputs: Sequence[torch.Tensor], start: Callable[[], Any], finish: Callable[[Any], Any]
    ) -> StagedMessage:
        """Have a thread call ``start``, and any thread ``finish`` once the work that ``start`` returned is complete."""

        def finish_or_fail(host_work: Any) -> Any:
            try:
                return finish(host_work)
            except Exception as error:
                self._fail(error)
                raise

        message = StagedMessage(outputs, self._lane, self._message_completer, finish_or_fail)
        self._note(message)

        def carry_out() -> None:
            try:
                host_work = start()
            except Exception as error:
                self._fail(error)
                message.end(None, error)
            else:
                message.set_host_work(host_work)
                host_work.when_done(lambda: self._finishes.put(message.finish))

        self._starts.put(carry_out)
        return message

    def _note(self, work: StagedWork) -> None:
        if self._coalesced.items is not None:
            self._coalesced.items.append(work)

    def _fail(self, error: Exception) -> None:
        if self.failure is None and isinstance(error, CommunicatorError):
            self.failure = error


def with_twins(argument: Nested, twins: dict[int, torch.Tensor]) -> Nested:
    """The argument with each tensor replaced by its twin."""
    if isinstance(argument, torch.Tensor):
        return twins[id(argument)]
    if isinstance(argument, list | tuple):
        return [with_twins(entry, twins) for entry in argument]
    return argument
