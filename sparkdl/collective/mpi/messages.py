"""Messages between two ranks of a communicator over MPI.

Both ends exchange envelopes before anything is written. The messages of one direction and tag are sent one after
another; all others proceed independently, polled by one thread that sleeps while there are none. Envelopes, the
answers to them and the data have MPI tags of their own, so that an envelope received from any rank is never taken for
something else.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.buffers import flatten
from sparkdl.collective.messages import PendingMessage, check_message, compare
from sparkdl.collective.mpi.library import load_mpi
from sparkdl.collective.mpi.operations import for_mpi, pieces, written_by_mpi
from sparkdl.collective.telemetry.monitor import OperationMonitor
from sparkdl.errors import CommunicatorError, MismatchError
from sparkdl.rendezvous.deadline import check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mpi4py import MPI

    from sparkdl.collective.buffers import FlatBuffer
    from sparkdl.collective.communicator import Array, Communicator
    from sparkdl.collective.operation_queue import FutureHandle


_SPIN_S = 0.02
_SHORT_NAP_S = 2e-4
_LONG_NAP_S = 2e-3
"""Pauses between two polls of all messages under way; the long one after a second without progress."""


class _MpiMessage(PendingMessage):
    """One end of a message, and the MPI requests that carry it, one after another.

    Attributes:
        steps: yields the requests.
        request: the current request; None before the first one.
    """

    steps: Generator[MPI.Request, MPI.Status, None]
    request: MPI.Request | None = None


class MpiMessages:
    """Sends and receives over one MPI communicator.

    Args:
        communicator: communicator whose ranks exchange messages.
        comm: its MPI communicator; the tags of the latter are used only for these messages.
        check: function that raises an error if the communicator has failed; takes a description of the call.
        fail: function that makes the communicator fail with an error.

    Attributes:
        monitor: monitor of the messages.
    """

    def __init__(
        self,
        communicator: Communicator,
        comm: MPI.Intracomm,
        *,
        check: Callable[[object], None],
        fail: Callable[[CommunicatorError], None],
    ) -> None:
        self._communicator, self._comm = communicator, comm
        self._check, self._fail = check, fail
        self.monitor = OperationMonitor(is_collective=False)
        self._mpi = load_mpi()
        highest = comm.Get_attr(self._mpi.TAG_UB)
        assert isinstance(highest, int), "MPI defines it for every communicator"
        self._max_tag = (highest - 2) // 3  # three MPI tags for each tag of a message
        self._lines: dict[tuple[str, int, int], deque[_MpiMessage]] = {}
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._abandoned: list[_MpiMessage] = []

    def queue(
        self, kind: str, array: Array, peer: int | None, tag: int, timeout_s: float | None
    ) -> FutureHandle:
        """Queue a ``"send"`` to a rank, or a ``"recv"`` from a rank, or from any rank if ``peer`` is None."""
        parent, is_send = self._communicator, kind == "send"
        check_message(peer, tag, rank=parent.rank, world_size=parent.world_size, max_tag=self._max_tag)
        buffer = flatten(array, reads=is_send, writes=not is_send)
        message = _MpiMessage(
            kind=kind,
            peer=peer,
            tag=tag,
            array=array,
            buffer=buffer,
            timeout_s=parent.timeout_s if timeout_s is None else check_timeout(timeout_s),
            monitor=self.monitor,
        )
        message.steps = (self._send if is_send else self._recv)(message, buffer)
        self._check(message.what)
        with self._news:
            if self._closed:
                raise CommunicatorError(f"{message.what}: communicator {parent.name!r} is closed")
            if self._thread is None:
                thread = threading.Thread(
                    target=self._serve, name=f"sparkdl-mpi-messages-{parent.name}", daemon=True
                )
                thread.start()  # a message waits only where a thread could start
                self._thread = thread
            self._lines.setdefault((kind, message.peer, tag), deque()).append(message)
            self._news.notify()
        return message.handle

    def close(self) -> None:
        """Wait for messages under way, and end the thread."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join()

    def _send(self, message: PendingMessage, buffer: FlatBuffer) -> Generator[MPI.Request, MPI.Status, None]:
        to, tag, theirs = message.peer, message.tag, np.empty(2, np.int64)
        yield self._comm.Isend(message.envelope, to, 3 * tag)
        yield self._comm.Irecv(theirs, to, 3 * tag + 1)
        compare(message.envelope, theirs, source=self._communicator.rank, to=to, tag=tag)
        message.note_match()
        buffer.pack()
        for piece in pieces(for_mpi(buffer.unread)):
            yield self._comm.Isend(piece, to, 3 * tag + 2)

    def _recv(self, message: PendingMessage, buffer: FlatBuffer) -> Generator[MPI.Request, MPI.Status, None]:
        tag, theirs = message.tag, np.empty(2, np.int64)
        source = self._mpi.ANY_SOURCE if message.peer < 0 else message.peer
        status = yield self._comm.Irecv(theirs, source, 3 * tag)
        source = status.Get_source()
        yield self._comm.Isend(message.envelope, source, 3 * tag + 1)
        compare(theirs, message.envelope, source=source, to=self._communicator.rank, tag=tag)
        message.note_match()
        with written_by_mpi(buffer.unread) as elements:
            for piece in pieces(elements):
                yield self._comm.Irecv(piece, source, 3 * tag + 2)
        buffer.unpack()

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

    def _advance(self, key: tuple[str, int, int], line: deque[_MpiMessage]) -> bool:
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

    def _step(self, message: _MpiMessage) -> bool:
        message.check_deadline(self._communicator)
        if message.request is None:
            message.request = next(message.steps)
        self._check(message.what)
        has_moved = False
        status = self._mpi.Status()
        while message.request.Test(status):
            if message.peer < 0:
                message.comes_from(status.Get_source())
            message.request = message.steps.send(status)
            has_moved = True
        return has_moved

    def _give_up(
        self, key: tuple[str, int, int], line: deque[_MpiMessage], failure: CommunicatorError
    ) -> None:
        # MPI may still write to the buffer: keep it.
        self._abandoned.append(line[0])
        self._fail(failure)
        self._finish(key, line, failure)

    def _finish(
        self, key: tuple[str, int, int], line: deque[_MpiMessage], error: CommunicatorError | None
    ) -> None:
        with self._news:
            message = line.popleft()
            if not line:
                del self._lines[key]
        if error is None:
            message.complete()
        else:
            message.fail(error)
