"""Messages between two ranks of a communicator that has none of its own, as that on the native core. Runs on ranks."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from sparkdl.collective.deadline import check_timeout
from sparkdl.collective.envelopes import check_peer, envelope_of
from sparkdl.collective.flat_buffers import flatten
from sparkdl.collective.message_link import MessageLink
from sparkdl.collective.message_monitor import MessageMonitor
from sparkdl.collective.pending_message import PendingMessage
from sparkdl.errors import CommunicatorError, ParamError

if TYPE_CHECKING:
    from sparkdl.collective.communicator import Array, Communicator
    from sparkdl.collective.handle import Handle
    from sparkdl.collective.rendezvous import Rendezvous

_MAX_TAG = 2**63 - 1


class Messages:
    """Sends and receives for the ranks of a communicator.

    Args:
        communicator: whose ranks exchange messages.
        rendezvous: of this communicator alone; links are opened over it.

    Attributes:
        monitor: tells of them.
    """

    def __init__(self, communicator: Communicator, rendezvous: Rendezvous) -> None:
        # Weak, as the communicator holds this: descriptors are closed when it goes, not when garbage is collected.
        self._communicator = weakref.ref(communicator)
        self._name, self._timeout_s = communicator.name, communicator.timeout_s
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._rendezvous = rendezvous
        self.monitor = MessageMonitor()
        self._links: dict[int, MessageLink] = {}
        self._lock = threading.Lock()
        self._closed = False
        # The threads of a communicator that is dropped without having been closed end with it.
        weakref.finalize(communicator, _finish_all, self._links)

    def send_async(self, array: Array, to: int, tag: int = 0, timeout_s: float | None = None) -> Handle:
        """Queue a message to rank ``to``; see the contract."""
        return self._queue("send", array, to, tag, timeout_s)

    def recv_async(self, array: Array, source: int, tag: int = 0, timeout_s: float | None = None) -> Handle:
        """Queue the arrival of a message of rank ``source``; see the contract."""
        return self._queue("recv", array, source, tag, timeout_s)

    def abort(self, reason: str) -> None:
        """Have all messages fail with ``reason``, here and at their other ends; returns at once."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.abort(reason)

    def close(self) -> None:
        """Wait for what is on its way, and close the links. May be called again."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.finish()
        for link in links:
            link.join()

    def _queue(self, kind: str, array: Array, peer: int, tag: int, timeout_s: float | None) -> Handle:
        check_peer(peer, self._rank, self._world_size)
        if not 0 <= tag <= _MAX_TAG:
            raise ParamError(f"tag {tag} is outside 0 to {_MAX_TAG}")
        timeout_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        buffer = flatten(array, writes=kind == "recv")
        what = f"{kind} of {buffer.data.size} {buffer.dtype} {'to' if kind == 'send' else 'from'} rank {peer}"
        with self._lock:
            communicator = self._communicator()
            if self._closed or communicator is None:
                raise CommunicatorError(f"{what} with tag {tag}: communicator {self._name!r} is closed")
            link = self._links.get(peer)
            if link is None:
                link = MessageLink(communicator, self._rendezvous, peer, timeout_s)
                self._links[peer] = link
        message = PendingMessage(
            what=f"{what} with tag {tag}",
            kind=kind,
            peer=peer,
            tag=tag,
            array=array,
            envelope=envelope_of(buffer),
            dtype=buffer.dtype,
            num_bytes=buffer.data.nbytes,
            timeout_s=timeout_s,
            monitor=self.monitor,
        )
        link.put(message)
        return message.handle


def _finish_all(links: dict[int, MessageLink]) -> None:
    for link in list(links.values()):
        link.finish()
