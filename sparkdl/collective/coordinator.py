"""The server behind the rendezvous: a key-value store that only holders of the job's secret can reach.

Runs in one process of the job, usually rank 0's barrier task or whoever starts the ranks. One thread serves
all connections from an event loop; handshakes with strangers happen in the listener's own (see ``listener``).
"""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import threading
from typing import TYPE_CHECKING

from sparkdl.collective.coordinator_protocol import MAX_FRAME_BYTES, Operation, Status, pack, unpack
from sparkdl.collective.frames import HEADER
from sparkdl.collective.key_values import KeyValues
from sparkdl.collective.listener import AuthenticatedListener, strangers_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from sparkdl.collective.key_values import Answer

logger = logging.getLogger(__name__)

PURPOSE = b"sparkdl coordinator"

_RECEIVE_BYTES = 1 << 20


class _Client:
    """One connection of the event loop: what has come in, what has to go out, and what it waits for."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.waits: dict[int, Callable[[], None]] = {}
        self.last_words: dict[str, bytes] = {}

    def next_frame(self) -> bytes | None:
        if len(self.incoming) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self.incoming)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"frame of {length} bytes announced; at most {MAX_FRAME_BYTES} are allowed")
        end = HEADER.size + length
        if len(self.incoming) < end:
            return None
        frame = bytes(self.incoming[HEADER.size : end])
        del self.incoming[:end]
        return frame

    def answer(self, request_id: int, status: Status, *fields: bytes) -> None:
        message = pack(request_id, status, fields)
        self.outgoing += HEADER.pack(len(message)) + message


class Coordinator:
    """Serves the rendezvous of one job from its construction until it is closed; a context manager.

    Args:
        secret: the job's secret; see :func:`sparkdl.collective.authentication.new_secret`.
        world_size: how many ranks will connect.
        host: address or addresses to bind; where other machines reach this one when None, see
            :func:`~sparkdl.collective.addresses.reachable_hosts`.

    Attributes:
        address: where clients reach it.
        num_admitted: how many connections have proved that they know the secret.
    """

    def __init__(self, *, secret: bytes, world_size: int, host: str | Sequence[str] | None = None) -> None:
        self._memory = KeyValues()
        self._clients: set[_Client] = set()
        self._arrivals: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        try:
            self._listener = AuthenticatedListener(
                secret,
                purpose=PURPOSE,
                host=host,
                on_connection=self._welcome,
                # All ranks may come at once.
                max_strangers=max(strangers_allowed(), 2 * world_size),
            )
        except BaseException:
            for resource in (self._selector, self._wake_in, self._wake_out):
                resource.close()
            raise
        self.address = self._listener.address
        self.num_admitted = 0
        self._thread = threading.Thread(target=self._serve, name="sparkdl-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving: connections are closed, clients that wait get an error. May be called again."""
        if self._closed.is_set():
            return
        self._listener.close()
        self._closed.set()
        self._wake_in.send(b"\0")
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _welcome(self, sock: socket.socket) -> None:
        self._arrivals.put(sock)
        try:
            self._wake_in.send(b"\0")
        except OSError:  # closed while the peer proved itself
            sock.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            timeout_s = self._memory.expire()
            self._flush()
            for key, events in self._selector.select(timeout_s):
                if key.data is None:
                    self._admit()
                elif events & selectors.EVENT_READ:
                    self._receive(key.data)
            self._flush()
        for client in list(self._clients):
            client.last_words.clear()
            self._drop(client)
        while not self._arrivals.empty():
            self._arrivals.get().close()
        self._selector.close()

    def _admit(self) -> None:
        self._wake_out.recv(4096)
        while not self._arrivals.empty():
            client = _Client(self._arrivals.get())
            client.sock.setblocking(False)
            self._clients.add(client)
            self.num_admitted += 1
            self._selector.register(client.sock, selectors.EVENT_READ, client)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.incoming += data
        try:
            while (frame := client.next_frame()) is not None:
                self._handle(client, *unpack(frame))
        except (ValueError, IndexError) as error:  # what is in a frame is damaged, or fields are missing
            logger.warning("Dropping a client of the coordinator: %s", error)
            self._drop(client)

    def _handle(self, client: _Client, request_id: int, kind: int, fields: list[bytes]) -> None:
        if kind == Operation.GET:
            self._wait(client, request_id, fields[0].decode(), int(fields[1]) / 1000)
            return
        if kind == Operation.EXCHANGE:
            self._exchange(client, request_id, fields)
            return
        try:
            answer = self._perform(client, kind, fields)
        except ValueError as error:
            client.answer(request_id, Status.REFUSED, str(error).encode())
        else:
            client.answer(request_id, Status.DONE, answer)

    def _wait(self, client: _Client, request_id: int, key: str, timeout_s: float) -> None:
        self._answer_later(
            client, request_id, lambda answer: self._memory.wait(key, timeout_s, answer), late=list
        )

    def _exchange(self, client: _Client, request_id: int, fields: list[bytes]) -> None:
        key, rank, world_size, value = fields[0].decode(), int(fields[1]), int(fields[2]), fields[3]
        timeout_s = int(fields[4]) / 1000
        self._answer_later(
            client,
            request_id,
            lambda answer: self._memory.exchange(key, rank, world_size, value, timeout_s, answer),
            late=lambda: [str(other).encode() for other in self._memory.ranks_in(key)],
        )

    def _answer_later(
        self,
        client: _Client,
        request_id: int,
        begin: Callable[[Answer], Callable[[], None]],
        *,
        late: Callable[[], list[bytes]],
    ) -> None:
        def answer(value: bytes | None) -> None:
            client.waits.pop(request_id, None)
            if value is None:
                client.answer(request_id, Status.LATE, *late())
            else:
                client.answer(request_id, Status.DONE, value)

        client.waits[request_id] = lambda: None
        end_wait = begin(answer)
        if request_id in client.waits:
            client.waits[request_id] = end_wait

    def _perform(self, client: _Client, kind: int, fields: list[bytes]) -> bytes:
        names = [field.decode(errors="replace") for field in fields] if kind == Operation.CHECK else []
        name = fields[0].decode() if fields else ""
        if kind == Operation.SET:
            self._memory.set(name, fields[1])
        elif kind == Operation.ADD:
            return str(self._memory.add(name, int(fields[1]))).encode()
        elif kind == Operation.COMPARE_SET:
            return self._memory.compare_set(name, fields[1], fields[2])
        elif kind == Operation.DELETE:
            return str(int(self._memory.delete(name))).encode()
        elif kind == Operation.CHECK:
            return str(int(self._memory.check(names))).encode()
        elif kind == Operation.NUM_KEYS:
            return str(self._memory.num_keys(name)).encode()
        elif kind == Operation.POST:
            return str(self._memory.post(name, fields[1])).encode()
        elif kind == Operation.POST_IF_LOST:
            client.last_words[name] = fields[1]
        elif kind == Operation.GOODBYE:
            client.last_words.clear()
        else:
            raise ValueError(f"unknown operation {kind}")
        return b""

    def _flush(self) -> None:
        for client in list(self._clients):
            if not client.outgoing:
                continue
            try:
                sent = client.sock.send(client.outgoing)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(client)
                continue
            del client.outgoing[:sent]
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
            if self._selector.get_key(client.sock).events != events:
                self._selector.modify(client.sock, events, client)

    def _drop(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        for end_wait in client.waits.values():
            end_wait()
        for queue_name, value in client.last_words.items():
            if value:
                self._memory.post(queue_name, value)
