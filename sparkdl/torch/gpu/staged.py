"""The collectives of c10d for CUDA tensors through host memory, and the stream that collectives of CUDA tensors run on.

Host memory is for ranks that share a GPU, which NCCL refuses. Tensors are copied to pinned memory, communicated there
as CPU tensors are (through shared memory, on one host), and copied back. The copies are in the order of the caller's
stream; a thread of the process group waits for them on the host, so that neither the caller nor its stream waits
before ``wait``. Collectives follow each other on this thread. Messages only start on it and end whenever their peer
takes them, so that two ranks may both send before they receive.

A lane is the stream beside the caller's on which collectives of CUDA tensors run, so that they overlap with
computation. Collectives use ``torch.cuda`` only in :class:`GpuLane`; the collectives here and in
:mod:`sparkdl.torch.gpu.nccl_tensors` use a lane through the protocol :class:`Lane`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError
from sparkdl.torch.work import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from sparkdl.collective import Handle
    from sparkdl.torch.process_group import SparkdlProcessGroup


Nested = Any
"""A tensor, or lists of them to any depth, as c10d's methods take them."""


class StagedWork(Work):
    """A collective in progress in host memory.

    ``wait`` makes the host wait until the collective is over, and the caller's stream until its results are copied.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], lane: Lane) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._lane = lane
        self._over = threading.Event()
        self._mark: Any = None
        self._failure: Exception | None = None
        self._source = lane.new_future()

        def outputs_or_failure(_: torch.futures.Future[Any]) -> list[torch.Tensor]:
            self.wait()
            return self._outputs

        # Only a callback of `then` can give waiters in C++ an error.
        self._future = self._source.then(outputs_or_failure)

    def end(self, mark: Any, failure: Exception | None) -> None:
        """Record the end of the collective: with a mark after the copies, or with a failure."""
        self._mark, self._failure = mark, failure
        self._over.set()
        self._source.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs hold the result, for the next work on the current stream.

        Raises:
            CommunicatorError: if the collective failed; the subclass says how.
        """
        timeout_s = seconds(timeout)
        if not self._over.wait(timeout_s):
            raise CommunicatorTimeoutError(
                f"the collective is not over after {timeout_s:g} s; it continues and can be waited for again"
            )
        if self._failure is not None:
            raise self._failure
        self._lane.join(self._mark)
        return True

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the collective is over, successfully or not."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether the collective is over and did not fail."""
        return self._over.is_set() and self._failure is None

    def exception(self) -> Exception | None:
        """The collective's error once it has failed, else None."""
        return self._failure

    def result(self) -> list[torch.Tensor]:
        """The output tensors; wait first."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors, or of the error."""
        return self._future


def _staged(
    method: str, *, reads: Sequence[int] = (), writes: Sequence[int] = (), is_message: bool = False
) -> Callable[..., StagedWork]:
    """Make a method that runs the host group's method on twins of its tensors in host memory.

    Args:
        method: name of the host group's method.
        reads: positions of the arguments whose tensors are copied to the host first.
        writes: positions of the arguments whose tensors are copied back afterwards.
        is_message: whether the thread goes on to the next operation before this one is over.
    """

    def call(self: StagedTensors, *arguments: Any) -> StagedWork:
        return self._stage(method, reads, writes, arguments, is_message)

    call.__doc__ = f"c10d's ``{method}``, as the host group does it."
    return call


class StagedTensors:
    """The backend of a process group for tensors on a GPU that its rank shares with other ranks.

    Args:
        host_group: process group of the same ranks for CPU tensors, used for nothing else: its collectives run in the
            order of the calls here, independently of other communication of the ranks.
        lane: lane on which the copies run.
        name: name by which the thread is distinguished.

    Attributes:
        failure: first error of the communicator below, or None.
    """

    def __init__(self, host_group: SparkdlProcessGroup, lane: Lane, name: str) -> None:
        self._host_group = host_group
        self._lane = lane
        self.failure: CommunicatorError | None = None
        self._coalesced: list[StagedWork] | None = None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sparkdl-staging-{name}", daemon=True)
        self._thread.start()

    allreduce = _staged("allreduce", reads=[0], writes=[0])
    allreduce_coalesced = _staged("allreduce_coalesced", reads=[0], writes=[0])
    reduce = _staged("reduce", reads=[0], writes=[0])
    broadcast = _staged("broadcast", reads=[0], writes=[0])
    allgather = _staged("allgather", reads=[1], writes=[0])
    _allgather_base = _staged("_allgather_base", reads=[1], writes=[0])
    allgather_into_tensor_coalesced = _staged("allgather_into_tensor_coalesced", reads=[1], writes=[0])
    reduce_scatter = _staged("reduce_scatter", reads=[1], writes=[0])
    _reduce_scatter_base = _staged("_reduce_scatter_base", reads=[1], writes=[0])
    reduce_scatter_tensor_coalesced = _staged("reduce_scatter_tensor_coalesced", reads=[1], writes=[0])
    gather = _staged("gather", reads=[1], writes=[0])
    scatter = _staged("scatter", reads=[1], writes=[0])
    alltoall = _staged("alltoall", reads=[1], writes=[0])
    alltoall_base = _staged("alltoall_base", reads=[1], writes=[0])
    send = _staged("send", reads=[0], is_message=True)
    recv = _staged("recv", writes=[0], is_message=True)

    def _start_coalescing(self, _: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _: torch.device) -> list[StagedWork]:
        """The works of all operations since :meth:`_start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return works

    def abort(self) -> None:
        """Make every collective fail, here and on the other ranks."""
        self._host_group.abort()

    def shutdown(self) -> None:
        """Complete the collectives in progress and close the host group."""
        self._end_thread()
        self._host_group.shutdown()

    def _end_thread(self) -> None:
        """Complete the collectives in progress and end the thread. May be called again."""
        self._queue.put(None)
        self._thread.join()

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
        read = [tensor for place in reads for tensor in tensors_in(arguments[place])]
        written = [tensor for place in writes for tensor in tensors_in(arguments[place])]
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
        """Have the thread call ``communicate``, which returns a mark after its work on the lane's stream."""
        work = self._new_work(outputs)
        self._queue.put(lambda: self._end(work, communicate))
        if not all(getattr(argument, "asyncOp", True) for argument in arguments):
            work.wait()
        return work

    def _submit_message(
        self, outputs: Sequence[torch.Tensor], start: Callable[[], Any], finish: Callable[[Any], Any]
    ) -> StagedWork:
        """Have the thread call ``start``, and any thread ``finish`` as soon as the work of ``start`` is complete."""
        work = self._new_work(outputs)

        def carry_out() -> None:
            try:
                host_work = start()
            except Exception as error:
                self._fail(work, error)
            else:
                host_work.when_done(lambda: self._end(work, lambda: finish(host_work)))

        self._queue.put(carry_out)
        return work

    def _new_work(self, outputs: Sequence[torch.Tensor]) -> StagedWork:
        work = StagedWork(outputs, self._lane)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _end(self, work: StagedWork, communicate: Callable[[], Any]) -> None:
        try:
            mark = communicate()
        except Exception as error:
            self._fail(work, error)
        else:
            work.end(mark, None)

    def _fail(self, work: StagedWork, error: Exception) -> None:
        if self.failure is None and isinstance(error, CommunicatorError):
            self.failure = error
        work.end(None, error)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task()


def tensors_in(argument: Nested) -> list[torch.Tensor]:
    """The tensors of an argument, in order; empty if it has none."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [tensor for entry in argument for tensor in tensors_in(entry)]
    return []


def with_twins(argument: Nested, twins: dict[int, torch.Tensor]) -> Nested:
    """The argument with each tensor replaced by its twin."""
    if isinstance(argument, torch.Tensor):
        return twins[id(argument)]
    if isinstance(argument, list | tuple):
        return [with_twins(entry, twins) for entry in argument]
    return argument


class Lane(Protocol):
    """The stream on which collectives of one device run, and the ways to wait for them."""

    def beside(self, tensors: Sequence[torch.Tensor], *, asynchronous: bool) -> AbstractContextManager[int]:
        """Within this context, torch's work runs after the caller's stream so far; yields the number of its stream.

        Args:
            tensors: tensors that the work within reads and writes.
            asynchronous: whether the caller's stream continues meanwhile; if not, the work runs on that stream.
        """

    def after(self, mark: Any, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[int]:
        """Within this context, torch's work runs beside the caller's stream, after a mark; yields its stream's number.

        Unlike :meth:`beside` it may be entered on any thread, and does not wait for other work on the caller's stream.

        Args:
            mark: mark after which the work runs, besides all earlier work on its own stream.
            tensors: tensors that the work within reads and writes; the caller keeps them until then.
        """

    def order(self, handle: Handle) -> None:
        """Order torch's later work on the same stream after the operations of ``handle``."""

    def mark(self) -> Any:
        """Return a mark of the point that the current stream has reached, for :meth:`join` and :meth:`block`."""

    def join(self, mark: Any) -> None:
        """Make the caller's stream wait for a mark; the host does not wait."""

    def block(self, mark: Any) -> None:
        """Make the host wait for a mark."""

    def host_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous host tensor of the same shape and dtype, for asynchronous copies to and from the device."""

    def new_future(self) -> torch.futures.Future[Any]:
        """A future whose value may be on the device; its waiters are ordered after the stream that set it."""


class GpuLane:
    """The lane of a GPU.

    Args:
        device: device of the GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    @contextmanager
    def beside(self, tensors: Sequence[torch.Tensor], *, asynchronous: bool) -> Iterator[int]:
        """See :class:`Lane`."""
        current = torch.cuda.current_stream(self._device)
        if not asynchronous:
            yield int(current.cuda_stream)
            return
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield int(self._side.cuda_stream)
        self._keep(tensors)

    @contextmanager
    def after(self, mark: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> Iterator[int]:
        """See :class:`Lane`."""
        with torch.cuda.stream(self._side):
            self._side.wait_event(mark)
            try:
                yield int(self._side.cuda_stream)
            finally:
                self._keep(tensors)

    def order(self, _: Handle) -> None:
        """See :class:`Lane`; a stream keeps its order by itself."""

    def mark(self) -> torch.cuda.Event:
        """See :class:`Lane`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self, mark: torch.cuda.Event) -> None:
        """See :class:`Lane`."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def block(self, mark: torch.cuda.Event) -> None:
        """See :class:`Lane`."""
        mark.synchronize()

    def host_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Lane`; the tensor is in pinned memory."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")

    def new_future(self) -> torch.futures.Future[Any]:
        """See :class:`Lane`."""
        return torch.futures.Future(devices=[self._device])

    def _keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of the tensors from reuse by the caller's stream before the lane's stream is done."""
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(self._side)
