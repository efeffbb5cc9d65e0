"""The link that carries all messages between this rank and one other.

A link consists of two communicators of the two ranks, opened when the first message is sent or expected. On each of
them one rank always sends and the other always receives. A link takes two threads, six descriptors and two segments,
regardless of the number of tags. The ranks exchange frames:

* ``OFFER``: announces a message, with its tag and envelope. The other end keeps the offer until the message is
  expected.
* ``ACCEPT``: says that the message is expected, with the envelope of the receiving end. If the envelopes differ, the
  message fails at both ends with the same :class:`~sparkdl.errors.MismatchError`, and the link can still be used.
* ``DATA``: the message itself, which is written directly to the receiver's array.
* ``BYE``: there will be no more messages; the other end answers with ``BYE``.

Until a message is expected, only its envelope is kept, and no message waits for one with another tag. A receive from
any rank waits in :class:`~sparkdl.collective.native.point_to_point.AnySource` until the link to one of the ranks
matches it with an offer.

The communicators of a link are opened over a part of a rendezvous in which waits end when the link's parent
communicator fails or is dropped.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.messages import NEWS_S, Envelope, compare, fail_communicator
from sparkdl.collective.telemetry.stalls import StallCheck
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, MismatchError
from sparkdl.rendezvous.deadline import MAX_TIMEOUT_S

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Communicator, Handle
    from sparkdl.collective.messages import PendingMessage
    from sparkdl.collective.native.point_to_point import AnySource
    from sparkdl.rendezvous.store import Rendezvous


Words = np.ndarray[Any, np.dtype[np.int64]]


class FrameKind(IntEnum):
    """Kind of a frame; see :mod:`sparkdl.collective.native.message_link`."""

    OFFER = 0
    ACCEPT = 1
    DATA = 2
    BYE = 3


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of a link.

    Attributes:
        kind: kind of the frame.
        number: number of the message, assigned by the sender of the message.
        tag: tag of the message.
        envelope: index of the dtype and number of elements, at the end that sends the frame.
        message: this end's message; not part of the encoded frame.
    """

    kind: FrameKind
    number: int = 0
    tag: int = 0
    envelope: tuple[int, int] = (0, 0)
    message: PendingMessage | None = None

    def to_array(self) -> Words:
        """Encode the frame as five int64."""
        return np.array([self.kind, self.number, self.tag, *self.envelope], np.int64)

    @classmethod
    def from_array(cls, words: Words) -> Frame:
        """Decode what :meth:`to_array` made."""
        kind, number, tag, dtype, count = words.tolist()
        return cls(kind=FrameKind(kind), number=number, tag=tag, envelope=(dtype, count))


_POLL_S = 0.2


def check_alive(reference: weakref.ref[Communicator]) -> Communicator:
    """Return the communicator.

    Raises:
        CommunicatorError: if it has failed or was garbage-collected.
    """
    communicator = reference()
    if communicator is None:
        raise CommunicatorError("the communicator was dropped")
    if communicator.failure is not None:
        raise CommunicatorError(communicator.failure)
    return communicator


_BYE_S = 2.0


class _PeerLeftError(CommunicatorError):
    pass


class _ClosedError(CommunicatorError):
    pass


class MessageLink:
    """Sends messages to one rank, and receives messages from it.

    Args:
        parent: communicator of both ranks.
        rendezvous: part of the rendezvous for the parent only.
        peer: the other rank.
        timeout_s: seconds for opening the link.
        any_source: receives from any rank that are not matched yet.
    """

    def __init__(
        self,
        parent: Communicator,
        rendezvous: Rendezvous,
        peer: int,
        timeout_s: float,
        any_source: AnySource,
    ) -> None:
        # Weak: the threads must not keep an unused communicator alive.
        self._parent = weakref.ref(parent)
        self._parent_name, self._rank, self._peer = parent.name, parent.rank, peer
        self._any_source = any_source
        # Waits end when the parent fails or is dropped.
        watched = rendezvous.view("messages", partial(check_alive, self._parent))
        ranks = sorted([parent.rank, peer])
        self._open_pairs = [
            (
                speaker == parent.rank,
                partial(
                    parent.open_other,
                    rendezvous=watched,
                    # There is one opening per name, so no count of openings is needed.
                    own_rendezvous=watched.view(f"{speaker} to {listener}"),
                    rank=ranks.index(parent.rank),
                    world_size=2,
                    secret=parent.secret,
                    transport=parent.requested_transport,
                    name=f"{parent.name}/messages {speaker} to {listener}",
                    host_of_rank=parent.topology.hosts_of(ranks),
                    timeout_s=timeout_s,
                    stall_check=StallCheck(warn_after_s=None),  # the receiving end waits without a limit
                    world_ranks=[parent.world_ranks[rank] for rank in ranks],
                ),
            )
            for speaker, listener in (ranks, ranks[::-1])
        ]
        self._news = threading.Condition()
        self._is_closing = False
        self._broken: Exception | None = None
        self._outbox: deque[Frame] = deque()
        self._lines: dict[tuple[str, int], deque[PendingMessage]] = {}
        """Messages under way, by kind and tag."""
        self._in_flight: PendingMessage | None = None
        """Message whose data this rank is sending right now."""
        self._num_offers = 0
        self._offered: dict[int, PendingMessage] = {}
        self._accepted: dict[int, PendingMessage] = {}
        self._offers: defaultdict[int, deque[Frame]] = defaultdict(deque)
        self._expected: defaultdict[int, deque[PendingMessage]] = defaultdict(deque)
        self._speaking: Communicator | None = None
        self._listening: Communicator | None = None
        # Daemons, so that the end of a process does not wait for messages.
        self._threads = [
            threading.Thread(target=run, name=f"sparkdl-{parent.name}-messages", daemon=True)
            for run in (self._listen, self._speak)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, message: PendingMessage) -> None:
        """Add a message."""
        with self._news:
            if self._broken is None:
                self._lines.setdefault((message.kind, message.tag), deque()).append(message)
                if message.kind == "send":
                    self._num_offers += 1
                    self._offered[self._num_offers] = message
                    self._outbox.append(self._frame(FrameKind.OFFER, self._num_offers, message))
                elif self._offers[message.tag]:
                    self._accept(self._offers[message.tag].popleft(), message)
                else:
                    self._expected[message.tag].append(message)
                self._news.notify_all()
                return
        is_closed = isinstance(self._broken, _ClosedError)
        message.fail(
            self._broken
            if is_closed
            else fail_communicator(message, self._broken, self._parent(), self._parent_name)
        )

    def take_for_any(self, tag: int) -> None:
        """Match an offer with this tag, if there is one, with a receive from any rank."""
        with self._news:
            if self._broken is None and self._offers[tag]:
                self._match_any(tag, self._offers[tag])

    def finish(self) -> None:
        """Close the link when no message is under way any more; returns at once."""
        with self._news:
            self._is_closing = True
            self._news.notify_all()

    def join(self) -> None:
        """Wait until the link is closed."""
        self._threads[1].join()

    def abort(self, reason: str) -> None:
        """Make all messages of the link fail, at both ends; returns at once."""
        for pair in (self._speaking, self._listening):
            if pair is not None:
                pair.abort(reason)

    def _match_any(self, tag: int, offers: deque[Frame]) -> None:
        message = self._any_source.take(tag)
        if message is not None:
            message.comes_from(self._peer)
            self._lines.setdefault((message.kind, tag), deque()).append(message)
            self._accept(offers.popleft(), message)
            self._news.notify_all()

    def _accept(self, offer: Frame, message: PendingMessage) -> None:
        message.note_match()
        self._outbox.append(self._frame(FrameKind.ACCEPT, offer.number, message))
        if self._agree(np.array(offer.envelope), message.envelope, message, self._peer, self._rank):
            self._accepted[offer.number] = message

    def _frame(self, kind: FrameKind, number: int, message: PendingMessage) -> Frame:
        dtype, count = message.envelope.tolist()
        return Frame(kind=kind, number=number, tag=message.tag, envelope=(dtype, count), message=message)

    def _agree(
        self, sent: Envelope, expected: Envelope, message: PendingMessage, source: int, to: int
    ) -> bool:
        try:
            compare(sent, expected, source=source, to=to, tag=message.tag)
        except MismatchError as error:
            self._drop(message)
            message.fail(error)
            return False
        return True

    def _drop(self, message: PendingMessage) -> None:
        line = self._lines[message.kind, message.tag]
        line.remove(message)
        if not line:
            del self._lines[message.kind, message.tag]

    def _complete(self, message: PendingMessage) -> None:
        with self._news:
            is_in_flight = message is self._in_flight
            if is_in_flight:
                self._in_flight = None
            if self._broken is None:
                self._drop(message)
            elif not is_in_flight:
                return  # the message has already failed
            self._news.notify_all()
        message.complete()

    def _listen(self) -> None:
        try:
            self._open()
            while (frame := self._hear()).kind != FrameKind.BYE:
                self._take(frame)
            self._break(_PeerLeftError(f"rank {self._peer} has closed the communicator"))
        except Exception as error:
            self._break(error)

    def _hear(self) -> Frame:
        said = np.empty(5, np.int64)
        self._receive(said)
        return Frame.from_array(said)

    def _take(self, frame: Frame) -> None:
        if frame.kind == FrameKind.DATA:
            with self._news:
                message = self._accepted.pop(frame.number)
            if message.envelope[1]:
                self._receive(message.array)
            self._complete(message)
            return
        with self._news:
            if frame.kind == FrameKind.ACCEPT:
                message = self._offered.pop(frame.number)
                message.note_match()
                if self._agree(message.envelope, np.array(frame.envelope), message, self._rank, self._peer):
                    self._outbox.append(self._frame(FrameKind.DATA, frame.number, message))
            elif self._expected[frame.tag]:
                self._accept(frame, self._expected[frame.tag].popleft())
            else:
                self._offers[frame.tag].append(frame)
                self._match_any(frame.tag, self._offers[frame.tag])
            self._news.notify_all()

    def _receive(self, array: object) -> None:
        assert self._listening is not None, "it is open"
        self._listening.broadcast(array, root=self._rank_in_pair(self._peer), timeout_s=MAX_TIMEOUT_S)

    def _speak(self) -> None:
        try:
            while (frame := self._next_frame()) is not None:
                self._send(frame.to_array())
                if frame.kind == FrameKind.DATA and frame.message is not None:
                    if frame.envelope[1]:
                        self._send(frame.message.array)
                    self._complete(frame.message)
                del frame
        except Exception as error:
            self._break(error)
        self._leave()

    def _next_frame(self) -> Frame | None:
        while True:
            with self._news:
                if self._broken is not None:
                    return None
                if self._outbox and self._speaking is not None:
                    frame = self._outbox.popleft()
                    if frame.kind == FrameKind.DATA:
                        self._in_flight = frame.message
                    return frame
                if self._is_closing and not self._lines:
                    return None
                self._news.wait(_POLL_S if self._lines else None)
            self._check_deadlines()

    def _send(self, array: object) -> None:
        assert self._speaking is not None, "it is open"
        handle: Handle = self._speaking.broadcast_async(
            array, root=self._rank_in_pair(self._rank), timeout_s=MAX_TIMEOUT_S
        )
        while True:
            try:
                handle.wait(_POLL_S)
            except CommunicatorTimeoutError:
                if handle.done():
                    raise
                self._check_deadlines()
            else:
                return

    def _check_deadlines(self) -> None:
        with self._news:
            first = [line[0] for line in self._lines.values()]
        if not first:
            return
        parent = check_alive(self._parent)
        for message in first:
            try:
                message.check_deadline(parent)
            except CommunicatorTimeoutError as error:
                if parent.failure is None:
                    parent.abort(str(error))
                self._break(error, culprit=message)
                return

    def _open(self) -> None:
        with self._any_source.called(self._peer):
            for speaks, open_pair in self._open_pairs:
                pair = open_pair()
                with self._news:
                    if speaks:
                        self._speaking = pair
                    else:
                        self._listening = pair
                    broken = self._broken
                    self._news.notify_all()
                if broken is not None:  # since before the pair was there, so that nothing else ends it
                    pair.abort(f"rank {self._rank}: {broken}")

    def _rank_in_pair(self, rank: int) -> int:
        """Return the number that ``rank`` has in the communicators of the link."""
        return int(rank == max(self._rank, self._peer))

    def _break(self, error: Exception, culprit: PendingMessage | None = None) -> None:
        """Make all current and later messages fail."""
        with self._news:
            if self._broken is None:
                self._broken = error
                failed = [message for line in self._lines.values() for message in line]
                if isinstance(error, _PeerLeftError) and self._in_flight is not None:
                    failed.remove(self._in_flight)  # the rank that left has received it
                else:
                    self._in_flight = None
                self._lines.clear()
                self._outbox.clear()
                self._news.notify_all()
            else:
                failed = [] if self._in_flight is None else [self._in_flight]
                self._in_flight = None
        if not isinstance(error, _PeerLeftError):
            self.abort(str(error))
        if threading.current_thread() is not self._threads[0]:
            self._threads[0].join(NEWS_S)  # it must not write to an array after the error was raised
        if culprit is not None and culprit in failed:
            failed.remove(culprit)
            culprit.fail(error)
        for message in failed:
            message.fail(fail_communicator(message, error, self._parent(), self._parent_name))

    def _leave(self) -> None:
        """Close the link; without a failure, send ``BYE`` to the other end first."""
        is_peaceful = self._broken is None or isinstance(self._broken, _PeerLeftError)
        if self._speaking is not None and is_peaceful:
            bye = Frame(kind=FrameKind.BYE).to_array()
            # An error means that the other end has left already.
            with contextlib.suppress(CommunicatorError):
                self._speaking.broadcast(bye, root=self._rank_in_pair(self._rank), timeout_s=_BYE_S)
                self._threads[0].join(_BYE_S)
        with self._news:
            self._broken = self._broken or _ClosedError(f"communicator {self._parent_name!r} is closed")
        if self._listening is not None and self._threads[0].is_alive():
            self._listening.abort(f"rank {self._rank} has closed the communicator")
        self._threads[0].join()
        for pair in (self._speaking, self._listening):
            if pair is not None:
                pair.close()
