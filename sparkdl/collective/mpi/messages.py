"""Messages between two ranks of a communicator over MPI, from arrays in CPU or GPU memory.

Arrays in GPU memory are passed to CUDA-aware MPI libraries: mpi4py takes any object that has
``__cuda_array_interface__`` (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html) and passes its
address to the library.

Both ends exchange envelopes before anything is written. The messages of one direction and tag are sent one after
another; all others proceed independently, polled by one thread that sleeps while there are none. Envelopes, the
answers to them and the data have MPI tags of their own, so that an envelope received from any rank is never taken for
something else.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.buffers import DeviceArray, FlatBuffer, flatten, item_bytes, storage_of
from sparkdl.collective.messages import MessageMonitor, check_peer, check_stall, compare, envelope_of
from sparkdl.collective.mpi.library import is_cuda_aware, library_name, load_mpi
from sparkdl.collective.mpi.operations import for_mpi, pieces, written_by_mpi
from sparkdl.collective.operation_queue import MessageHandle
from sparkdl.collective.telemetry.stalls import NotedWait, StallTimer
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, MismatchError, ParamError
from sparkdl.rendezvous.deadline import Deadline, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mpi4py import MPI

    from sparkdl.collective.communicator import Array
    from sparkdl.collective.messages import MessageTiming
    from sparkdl.collective.telemetry.stalls import StallCheck


_entered = threading.local()


def enter_gpu(gpu: int) -> None:
    """Make a GPU the current device of this thread, as CUDA-aware MPI libraries require.

    Raises:
        CommunicatorError: if the CUDA driver returns an error.
    """
    if getattr(_entered, "gpu", None) == gpu:
        return
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    result = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu) or driver.cuCtxPushCurrent_v2(
        context
    )
    if result:
        raise CommunicatorError(
            f"GPU {gpu} could not be used for MPI: the CUDA driver returned error {result}"
        )
    _entered.gpu = gpu


@dataclass(frozen=True)
class DeviceElements:
    """Elements in GPU memory, viewed as unsigned integers of the same width, as MPI only moves them."""

    pointer: int
    size: int
    item_bytes: int

    def __getitem__(self, part: slice) -> DeviceElements:
        start, stop, _ = part.indices(self.size)
        return DeviceElements(self.pointer + start * self.item_bytes, stop - start, self.item_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": f"|u{self.item_bytes}" if self.item_bytes == 1 else f"<u{self.item_bytes}",
            "data": (self.pointer, False),
            "version": 3,
        }


class DeviceBuffer:
    """An array in GPU memory, with the part of :class:`~sparkdl.collective.buffers.FlatBuffer` that messages need.

    Attributes:
        dtype: dtype of the array.
        data: elements of the array.
        owner: the array, which keeps the memory alive.
    """

    def __init__(self, array: DeviceArray) -> None:
        self.dtype = array.dtype
        self.data = DeviceElements(array.pointer, array.count, storage_of(array.dtype).itemsize)
        self.owner = array

    @property
    def unread(self) -> DeviceElements:
        """The elements."""
        return self.data

    def enter(self) -> None:
        """Prepare this thread for MPI calls with the elements."""
        if self.owner.gpu is not None:
            enter_gpu(self.owner.gpu)


_SPIN_S = 0.02
_SHORT_NAP_S = 2e-4
_LONG_NAP_S = 2e-3
"""Pauses between two polls of all messages under way; the long one after a second without progress."""


@dataclass(kw_only=True)
class _Message:
    """One end of a message under way."""

    what: str
    peer: int
    """Rank of the other end; -1 for any rank, until an envelope has arrived."""
    steps: Generator[MPI.Request, MPI.Status, None]
    timeout_s: float
    timing: MessageTiming
    stall: StallTimer | None = None
    future: Future[None] = field(default_factory=Future)
    handle: MessageHandle = field(init=False)
    request: MPI.Request | None = None
    deadline: Deadline | None = None
    wait: NotedWait | None = None


class MpiMessages:
    """Sends and receives over one MPI communicator.

    Args:
        comm: MPI communicator of all ranks; its tags are used only for these messages.
        name: name of the communicator, used in error messages.
        check: function that raises an error if the communicator has failed; takes a description of the call.
        fail: function that makes the communicator fail with an error.
        stall_check: when a message whose other end does not join is reported.
        called: name of the communicator in these reports.
        world_ranks: world rank of each rank of the communicator.

    Attributes:
        monitor: monitor of the messages.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        name: str,
        *,
        check: Callable[[object], None],
        fail: Callable[[CommunicatorError], None],
        stall_check: StallCheck,
        called: str,
        world_ranks: Sequence[int],
    ) -> None:
        self._comm = comm
        self._name = name
        self._check, self._fail = check, fail
        self._stall_check, self._called = stall_check, called
        self._world_ranks = world_ranks
        self.monitor = MessageMonitor()
        self._mpi = load_mpi()
        highest = comm.Get_attr(self._mpi.TAG_UB)
        assert isinstance(highest, int), "MPI defines it for every communicator"
        self._max_tag = (highest - 2) // 3  # three MPI tags for each tag of a message
        self._lines: dict[tuple[str, int, int], deque[_Message]] = {}
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._abandoned: list[_Message] = []

    def send(self, array: Array, to: int, tag: int, timeout_s: float) -> MessageHandle:
        """Queue a message to rank ``to``; see the contract."""
        buffer = self._buffer_of(array)
        what = f"send of {buffer.data.size} {buffer.dtype} to rank {to} with tag {tag}"
        return self._queue("send", buffer, to, tag, what, timeout_s)

    def recv(self, array: Array, source: int | None, tag: int, timeout_s: float) -> MessageHandle:
        """Queue a receive from rank ``source``, or from any rank when None; see the contract."""
        buffer = self._buffer_of(array, writes=True)
        whom = "any rank" if source is None else f"rank {source}"
        what = f"recv of {buffer.data.size} {buffer.dtype} from {whom} with tag {tag}"
        return self._queue("recv", buffer, source, tag, what, timeout_s)

    def close(self) -> None:
        """Wait for messages under way, and end the thread."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join()

    def _queue(
        self,
        kind: str,
        buffer: FlatBuffer | DeviceBuffer,
        peer: int | None,
        tag: int,
        what: str,
        timeout_s: float,
    ) -> MessageHandle:
        if peer is not None:
            check_peer(peer, self._comm.Get_rank(), self._comm.Get_size())
        elif self._comm.Get_size() == 1:
            raise ParamError("a world of one rank has no other to receive a message from")
        peer = -1 if peer is None else peer
        check_timeout(timeout_s)
        if not 0 <= tag <= self._max_tag:
            raise ParamError(f"tag {tag} is outside 0 to {self._max_tag}, which this MPI library allows")
        self._check(what)
        num_bytes = buffer.data.size * item_bytes(buffer.dtype)
        timing = self.monitor.begin(kind, tag=tag, num_bytes=num_bytes, dtype=buffer.dtype)
        steps = (self._send if kind == "send" else self._recv)(buffer, peer, tag, timing)
        message = _Message(what=what, peer=peer, steps=steps, timeout_s=timeout_s, timing=timing)
        message.handle = MessageHandle(message.future, self.monitor.blocked, peer)
        with self._news:
            if self._closed:
                raise CommunicatorError(f"{what}: communicator {self._name!r} is closed")
            self._lines.setdefault((kind, peer, tag), deque()).append(message)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"sparkdl-mpi-messages-{self._name}", daemon=True
                )
                self._thread.start()
            self._news.notify()
        return message.handle

    def _buffer_of(self, array: Array, *, writes: bool = False) -> FlatBuffer | DeviceBuffer:
        if not isinstance(array, DeviceArray):
            return flatten(array, reads=not writes, writes=writes)
        if not is_cuda_aware():
            raise ParamError(f"{library_name()} does not take arrays in GPU memory; copy them to the host")
        return DeviceBuffer(array)

    def _send(
        self, buffer: FlatBuffer | DeviceBuffer, to: int, tag: int, timing: MessageTiming
    ) -> Generator[MPI.Request, MPI.Status, None]:
        mine, theirs = envelope_of(buffer), np.empty(2, np.int64)
        if isinstance(buffer, DeviceBuffer):
            buffer.enter()
        yield self._comm.Isend(mine, to, 3 * tag)
        yield self._comm.Irecv(theirs, to, 3 * tag + 1)
        compare(mine, theirs, source=self._comm.Get_rank(), to=to, tag=tag)
        timing.both_here()
        if isinstance(buffer, FlatBuffer):
            buffer.pack()
        whole = buffer.unread if isinstance(buffer, DeviceBuffer) else for_mpi(buffer.unread)
        for piece in pieces(whole):
            yield self._comm.Isend(piece, to, 3 * tag + 2)

    def _recv(
        self, buffer: FlatBuffer | DeviceBuffer, source: int, tag: int, timing: MessageTiming
    ) -> Generator[MPI.Request, MPI.Status, None]:
        mine, theirs = envelope_of(buffer), np.empty(2, np.int64)
        if isinstance(buffer, DeviceBuffer):
            buffer.enter()
        status = yield self._comm.Irecv(theirs, self._mpi.ANY_SOURCE if source < 0 else source, 3 * tag)
        source = status.Get_source()
        yield self._comm.Isend(mine, source, 3 * tag + 1)
        compare(theirs, mine, source=source, to=self._comm.Get_rank(), tag=tag)
        timing.both_here()
        with self._written(buffer) as whole:
            for piece in pieces(whole):
                yield self._comm.Irecv(piece, source, 3 * tag + 2)
        if isinstance(buffer, FlatBuffer):
            buffer.unpack()

    def _written(self, buffer: FlatBuffer | DeviceBuffer) -> AbstractContextManager[Any]:
        return (
            nullcontext(buffer.unread) if isinstance(buffer, DeviceBuffer) else written_by_mpi(buffer.unread)
        )

    def _serve(self) -> None:
        quiet_since = time.monotonic()
        while True:
            with self._news:
                if not self._lines:
                    if self._closed:
                        return
                    self._news.wait()
                    quiet_since = time.monotonic()
                lines = list(self._lines.items())
            moves = [self._advance(*line) for line in lines]
            if any(moves):
                quiet_since = time.monotonic()
                continue
            quiet_s = time.monotonic() - quiet_since
            if quiet_s < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_SHORT_NAP_S if quiet_s < 1.0 else _LONG_NAP_S)

    def _advance(self, key: tuple[str, int, int], line: deque[_Message]) -> bool:
        """Advance the first message of a line; return whether the message made progress."""
        message = line[0]
        try:
            has_moved = self._step(message)
        except StopIteration:
            self._finish(key, line, None)
        except MismatchError as error:
            self._finish(key, line, error)
        except self._mpi.Exception as error:
            self._give_up(key, line, CommunicatorError(f"{message.what} failed in MPI: {error}"))
        except CommunicatorError as error:
            self._give_up(key, line, error)
        except Exception as error:
            # No error may end the thread that advances all messages.
            failure = CommunicatorError(f"{message.what} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._give_up(key, line, failure)
        else:
            return has_moved
        return True

    def _step(self, message: _Message) -> bool:
        if message.deadline is None:
            message.deadline, message.stall = Deadline(message.timeout_s), StallTimer(self._stall_check)
            ranks = (
                range(len(self._world_ranks)) if message.peer < 0 else (self._comm.Get_rank(), message.peer)
            )
            both = [self._world_ranks[rank] for rank in ranks]
            message.wait = NotedWait(self._name, both, message.what, message.timeout_s)
            message.request = next(message.steps)
        assert message.request is not None
        self._check(message.what)
        has_moved = False
        status = self._mpi.Status()
        while message.request.Test(status):
            if message.peer < 0:
                message.peer = message.handle.source = status.Get_source()
            message.request = message.steps.send(status)
            has_moved = True
        if message.wait is not None and message.timing.is_ready:
            message.wait.end()
        if message.deadline.expired:
            why = "no rank has sent one" if message.peer < 0 else f"rank {message.peer} has not answered"
            raise CommunicatorTimeoutError(
                f"{message.what} on {self._name!r} was not complete within {message.timeout_s:g} s: {why}"
            )
        if message.stall is not None and not message.timing.is_ready:
            rank, peer = self._comm.Get_rank(), message.peer
            check_stall(message.stall, self._stall_check, self._called, message.what, rank=rank, peer=peer)
        return has_moved

    def _give_up(self, key: tuple[str, int, int], line: deque[_Message], failure: CommunicatorError) -> None:
        # MPI may still write to the buffer: keep it.
        self._abandoned.append(line[0])
        self._fail(failure)
        self._finish(key, line, failure)

    def _finish(
        self, key: tuple[str, int, int], line: deque[_Message], error: CommunicatorError | None
    ) -> None:
        with self._news:
            message = line.popleft()
            if not line:
                del self._lines[key]
        message.timing.end(is_ok=error is None)
        if message.wait is not None:
            message.wait.end()
        if error is None:
            message.future.set_result(None)
        else:
            message.future.set_exception(error)
