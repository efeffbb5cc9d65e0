"""Messages between two ranks of a native communicator, whose core has only collectives."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.collective.buffers import flatten
from sparkdl.collective.messages import PendingMessage, check_message, fail_communicator
from sparkdl.collective.native.message_link import MessageLink, check_alive
from sparkdl.collective.telemetry.monitor import OperationMonitor
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError
from sparkdl.rendezvous.deadline import check_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sparkdl.collective.communicator import Array, Communicator
    from sparkdl.collective.operation_queue import FutureHandle
    from sparkdl.rendezvous.store import Rendezvous

_MAX_TAG = 2**63 - 1

_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.5
"""Shortest and longest pause between two polls for new senders, while a message is expected from any rank."""


class NativeMessages:
    """Sends and receives messages for one rank of a communicator.

    Args:
        communicator: communicator whose ranks exchange messages; kept weakly.
        rendezvous: part of the rendezvous for this communicator only; links are opened over it.

    Attributes:
        monitor: monitor of the messages.
    """

    def __init__(self, communicator: Communicator, rendezvous: Rendezvous) -> None:
        # Weak, to avoid a reference cycle: descriptors are closed when the communicator is dropped, not by a later gc.
        self._communicator = weakref.ref(communicator)
        self._name, self._timeout_s = communicator.name, communicator.timeout_s
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._rendezvous = rendezvous
        self.monitor = OperationMonitor(is_collective=False)
        self._links: dict[int, MessageLink] = {}
        self._any_source = AnySource(self, communicator, rendezvous)
        self._lock = threading.Lock()
        self._closed = False
        # The threads of a communicator that is dropped without close() end with it.
        weakref.finalize(communicator, _finish_all, self._links)

    def queue(
        self, kind: str, array: Array, peer: int | None, tag: int, timeout_s: float | None
    ) -> FutureHandle:
        """Queue a ``"send"`` to a rank, or a ``"recv"`` from a rank, or from any rank if ``peer`` is None."""
        check_message(peer, tag, rank=self._rank, world_size=self._world_size, max_tag=_MAX_TAG)
        timeout_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        message = PendingMessage(
            kind=kind,
            peer=peer,
            tag=tag,
            array=array,
            buffer=flatten(array, writes=kind == "recv"),
            timeout_s=timeout_s,
            monitor=self.monitor,
        )
        link = None
        try:
            if peer is not None:
                link = self.link_to(peer, timeout_s)
            elif self._closed:
                raise CommunicatorError(f"communicator {self._name!r} is closed")
        except CommunicatorError as error:
            raise CommunicatorError(f"{message.what}: {error}") from None
        if link is not None:
            link.put(message)
        else:
            self._any_source.put(message)
        return message.handle

    def link_to(self, peer: int, timeout_s: float) -> MessageLink:
        """Return the link to a rank, created at first use.

        Raises:
            CommunicatorError: if the communicator is closed.
        """
        with self._lock:
            communicator = self._communicator()
            if self._closed or communicator is None:
                raise CommunicatorError(f"communicator {self._name!r} is closed")
            link = self._links.get(peer)
            if link is None:
                link = MessageLink(communicator, self._rendezvous, peer, timeout_s, self._any_source)
                self._links[peer] = link
        return link

    def links(self) -> dict[int, MessageLink]:
        """Return the existing links, by rank."""
        with self._lock:
            return dict(self._links)

    def abort(self, reason: str) -> None:
        """Make all messages fail with ``reason``, here and at their other ends; returns at once."""
        for link in self.links().values():
            link.abort(reason)

    def close(self) -> None:
        """Wait for messages under way, and close the links. May be called again."""
        self._any_source.join()
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.finish()
        for link in links:
            link.join()


class AnySource:
    """Receives from any rank that have not been matched with a message yet.

    The link between two ranks is opened when one of them sends or expects a message; that rank leaves a note in the
    rendezvous. While receives from any rank are pending, a thread polls for such notes and opens the links. The links
    match the offers that arrive with the receives that wait here.

    Args:
        messages: messages of the communicator; kept weakly.
        communicator: communicator that receives the messages; kept weakly.
        rendezvous: part of the rendezvous for the communicator only.
    """

    def __init__(self, messages: NativeMessages, communicator: Communicator, rendezvous: Rendezvous) -> None:
        self._messages = weakref.ref(messages)
        self._communicator = weakref.ref(communicator)
        self._name, self._rank, self._world_size = (
            communicator.name,
            communicator.rank,
            communicator.world_size,
        )
        self._notes = rendezvous.view("callers")
        self._lock = threading.Lock()
        self._waiting: defaultdict[int, deque[PendingMessage]] = defaultdict(deque)
        self._thread: threading.Thread | None = None

    def put(self, message: PendingMessage) -> None:
        """Add a message."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name=f"sparkdl-{self._name}-messages-from-any", daemon=True
                )
                thread.start()  # a message waits only where a thread could start
                self._thread = thread
            self._waiting[message.tag].append(message)
        messages = self._messages()
        for link in messages.links().values() if messages is not None else ():
            link.take_for_any(message.tag)

    def take(self, tag: int) -> PendingMessage | None:
        """Remove and return the oldest message with a tag; None if there is none."""
        with self._lock:
            return self._waiting[tag].popleft() if self._waiting[tag] else None

    @contextmanager
    def called(self, peer: int) -> Iterator[None]:
        """Announce this rank, while its link is opened, to a peer that expects a message from any rank."""
        key = f"of {peer}/{self._rank}"
        self._notes.set(key, b"")
        try:
            yield
        finally:
            # The rendezvous may already be closed, for which every kind of store has its own error.
            with contextlib.suppress(Exception):
                self._notes.delete(key)

    def join(self) -> None:
        """Wait until no message from any rank is expected any more."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        pause, pause_s = threading.Event(), _FIRST_LOOK_S
        while True:
            with self._lock:
                first = [line[0] for line in self._waiting.values() if line]
                if not first:
                    self._thread = None
                    return
            try:
                self._poll(first)
            except Exception as error:
                self._fail(error)
            del first
            pause.wait(pause_s)
            pause_s = min(_LAST_LOOK_S, 1.5 * pause_s)

    def _poll(self, first: Sequence[PendingMessage]) -> None:
        communicator = check_alive(self._communicator)
        for message in first:
            self._check_deadline(message, communicator)
        self._answer_callers(max(message.timeout_s for message in first))

    def _check_deadline(self, message: PendingMessage, communicator: Communicator) -> None:
        try:
            message.check_deadline(communicator)
        except CommunicatorTimeoutError as error:
            with self._lock:
                if message not in self._waiting[message.tag]:
                    return  # it has been matched meanwhile; its link checks the deadline
                self._waiting[message.tag].remove(message)
            if communicator.failure is None:
                communicator.abort(str(error))
            message.fail(error)

    def _answer_callers(self, timeout_s: float) -> None:
        messages = self._messages()
        if messages is None:
            return
        others = set(range(self._world_size)) - {self._rank} - set(messages.links())
        for peer in sorted(others):
            if self._notes.check([f"of {self._rank}/{peer}"]):
                messages.link_to(peer, timeout_s)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            failed = [message for line in self._waiting.values() for message in line]
            self._waiting.clear()
        for message in failed:
            message.fail(fail_communicator(message, error, self._communicator(), self._name))


def _finish_all(links: dict[int, MessageLink]) -> None:
    for link in list(links.values()):
        link.finish()
