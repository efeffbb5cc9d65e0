"""Messages between two ranks of a communicator that has none of its own, as that on the native core. Runs on ranks.

A channel carries the messages of one direction and tag, one after another: a communicator of the two ranks, opened when
the first message is sent or expected, and a thread that waits for it, so that nobody else has to. Both ends exchange
envelopes before anything is written. Whatever else goes wrong on a channel ends the communicator that it belongs to.
"""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.deadline import Deadline, check_timeout
from sparkdl.collective.envelopes import Envelope, check_peer, compare, envelope_of
from sparkdl.collective.flat_buffers import flatten
from sparkdl.collective.opening import open_communicator
from sparkdl.collective.rendezvous import PrefixRendezvous
from sparkdl.collective.turns import FutureHandle
from sparkdl.errors import (
    CommunicatorAbortedError,
    CommunicatorError,
    CommunicatorTimeoutError,
    MismatchError,
    ParamError,
    RankLostError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective.communicator import Array, Communicator
    from sparkdl.collective.handle import Handle
    from sparkdl.collective.rendezvous import Rendezvous

_LOOK_AROUND_S = 0.2
"""How often a message under way looks whether the communicator has failed meanwhile."""

_NEWS_S = 3.0
"""How long the communicator may take to learn by itself why a channel failed."""


class Messages:
    """Sends and receives for the ranks of a communicator.

    Args:
        communicator: whose ranks exchange messages.
        rendezvous: of this communicator alone; channels are opened over it.
    """

    def __init__(self, communicator: Communicator, rendezvous: Rendezvous) -> None:
        # Weak, as the communicator holds this: descriptors are closed when it goes, not when garbage is collected.
        self._communicator = weakref.ref(communicator)
        self._name, self._timeout_s = communicator.name, communicator.timeout_s
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._rendezvous = rendezvous
        self._channels: dict[tuple[int, int, int], _Channel] = {}
        self._lock = threading.Lock()
        self._closed = False
        # The threads of a communicator that is dropped without having been closed end with it.
        weakref.finalize(communicator, _finish_all, self._channels)

    def send_async(self, array: Array, to: int, tag: int = 0, timeout_s: float | None = None) -> Handle:
        """Queue a message to rank ``to``; see the contract."""
        check_peer(to, self._rank, self._world_size)
        return self._queue(array, self._rank, to, tag, timeout_s)

    def recv_async(self, array: Array, source: int, tag: int = 0, timeout_s: float | None = None) -> Handle:
        """Queue the arrival of a message of rank ``source``; see the contract."""
        check_peer(source, self._rank, self._world_size)
        return self._queue(array, source, self._rank, tag, timeout_s)

    def abort(self, reason: str) -> None:
        """Have all messages fail with ``reason``, here and at their other ends; returns at once."""
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.abort(reason)

    def close(self) -> None:
        """Wait for what is on its way, and close the channels. May be called again."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.finish()
        for channel in channels:
            channel.join()

    def _queue(self, array: Array, source: int, to: int, tag: int, timeout_s: float | None) -> Handle:
        if tag < 0:
            raise ParamError(f"tag {tag} is negative")
        timeout_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        is_sent = source == self._rank
        buffer = flatten(array, writes=not is_sent)
        what = f"{'send' if is_sent else 'recv'} of {buffer.data.size} {buffer.dtype}"
        message = _Message(
            what=f"{what} {f'to rank {to}' if is_sent else f'from rank {source}'} with tag {tag}",
            array=array,
            envelope=envelope_of(buffer),
            timeout_s=timeout_s,
        )
        with self._lock:
            communicator = self._communicator()
            if self._closed or communicator is None:
                raise CommunicatorError(f"{message.what}: communicator {self._name!r} is closed")
            channel = self._channels.get((source, to, tag))
            if channel is None:
                channel = _Channel(communicator, self._rendezvous, source, to, tag)
                self._channels[source, to, tag] = channel
            channel.put(message)
        return FutureHandle(message.future)


def _finish_all(channels: dict[tuple[int, int, int], _Channel]) -> None:
    for channel in list(channels.values()):
        channel.finish()


@dataclass(frozen=True, kw_only=True)
class _Message:
    what: str
    array: Array
    envelope: Envelope
    timeout_s: float
    future: Future[None] = field(default_factory=Future)


class _Channel:
    """One direction and tag between this rank and another."""

    def __init__(self, parent: Communicator, rendezvous: Rendezvous, source: int, to: int, tag: int) -> None:
        # Weak, or its thread would keep a communicator that nobody has any more.
        self._parent = weakref.ref(parent)
        self._parent_name = parent.name
        self._rendezvous = _WatchedRendezvous(rendezvous, self._parent)
        self._source, self._to, self._tag = source, to, tag
        self._peer = to if parent.rank == source else source
        # A channel is opened once, so its part of the rendezvous is its own.
        self._open_pair = partial(
            open_communicator,
            rendezvous=self._rendezvous,
            rank=0 if parent.rank == source else 1,
            world_size=2,
            secret=parent.secret,
            transport=parent.requested_transport,
            name=f"{parent.name}/message {source} to {to} tag {tag}",
            host_of_rank=parent.hosts_of([source, to]),
            own_rendezvous=PrefixRendezvous(self._rendezvous, f"{source} to {to} tag {tag}"),
        )
        self._pair: Communicator | None = None
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        # A daemon: a process whose end nobody announced does not wait for its messages.
        self._thread = threading.Thread(
            target=self._serve, name=f"sparkdl-{parent.name}-messages", daemon=True
        )
        self._thread.start()

    def put(self, message: _Message) -> None:
        self._messages.put(message)

    def finish(self) -> None:
        self._messages.put(None)

    def join(self) -> None:
        self._thread.join()

    def abort(self, reason: str) -> None:
        pair = self._pair
        if pair is not None:
            pair.abort(reason)

    def _serve(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._carry(message)
                del message
        finally:
            if self._pair is not None:
                self._pair.close()
                self._pair = None

    def _carry(self, message: _Message) -> None:
        try:
            self._deliver(message)
        except MismatchError as error:
            message.future.set_exception(error)
        except Exception as error:
            message.future.set_exception(self._explain(message, error))
        else:
            message.future.set_result(None)

    def _deliver(self, message: _Message) -> None:
        _check(self._parent)
        if self._pair is None:
            self._pair = self._open_pair(timeout_s=message.timeout_s)
        said = np.empty((2, 2), np.int64)
        self._wait(self._pair.allgather_async(message.envelope, said, timeout_s=message.timeout_s))
        compare(said[0], said[1], source=self._source, to=self._to, tag=self._tag)
        if message.envelope[1]:
            self._wait(self._pair.broadcast_async(message.array, root=0, timeout_s=message.timeout_s))

    def _wait(self, handle: Handle) -> None:
        while not handle.done():
            _check(self._parent)
            try:
                handle.wait(_LOOK_AROUND_S)
            except CommunicatorTimeoutError:
                continue  # if it was the operation's own, it is raised below
        handle.wait()

    def _explain(self, message: _Message, error: Exception) -> CommunicatorError:
        """Say what went wrong in the words of the parent, which can be used no further either."""
        what = f"{message.what} on {self._parent_name!r}"
        late = isinstance(error, CommunicatorTimeoutError)
        if late:
            error = CommunicatorTimeoutError(
                f"{what} was not complete within {message.timeout_s:g} s: rank {self._peer} has not answered"
            )
        parent = self._parent()
        if parent is None:
            return CommunicatorError(f"{what} failed: {error}")
        if late and parent.failure is None:
            parent.abort(str(error))
            return CommunicatorTimeoutError(str(error))
        is_news = isinstance(error, RankLostError | CommunicatorAbortedError)
        if _failed_by_itself(parent, _NEWS_S if is_news else 0.0):
            try:
                parent.barrier()  # refused with what the parent failed with
            except CommunicatorError as failure:
                return type(failure)(f"{message.what}: {failure}")
        reason = f"{what} failed: {error}"
        parent.abort(reason)
        return RankLostError(reason) if isinstance(error, RankLostError) else CommunicatorError(reason)


def _failed_by_itself(communicator: Communicator, timeout_s: float) -> bool:
    deadline = Deadline(timeout_s)
    pause = threading.Event()
    while communicator.failure is None and not deadline.expired:
        pause.wait(_LOOK_AROUND_S / 10)
    return communicator.failure is not None


def _check(reference: weakref.ref[Communicator]) -> None:
    communicator = reference()
    if communicator is None:
        raise CommunicatorError("the communicator was dropped")
    if communicator.failure is not None:
        raise CommunicatorError(communicator.failure)


class _WatchedRendezvous(PrefixRendezvous):
    """A part of a rendezvous in which waits end when a communicator fails."""

    def __init__(self, rendezvous: Rendezvous, communicator: weakref.ref[Communicator]) -> None:
        super().__init__(rendezvous, "messages")
        self._communicator = communicator

    def exchange(
        self, key: str, *, rank: int, world_size: int, value: bytes, timeout_s: float
    ) -> list[bytes] | frozenset[int]:
        deadline = Deadline(timeout_s)
        while True:
            _check(self._communicator)
            values = super().exchange(
                key,
                rank=rank,
                world_size=world_size,
                value=value,
                timeout_s=deadline.at_most(_LOOK_AROUND_S).timeout_s,
            )
            if isinstance(values, list) or deadline.expired:
                return values

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = Deadline(timeout_s)
        while True:
            _check(self._communicator)
            try:
                return super().get(key, deadline.at_most(_LOOK_AROUND_S).timeout_s)
            except CommunicatorTimeoutError:
                if deadline.expired:
                    raise

    def check(self, keys: Sequence[str]) -> bool:
        _check(self._communicator)
        return super().check(keys)
