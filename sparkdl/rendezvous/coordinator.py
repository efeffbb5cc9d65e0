"""The server of the rendezvous: a key-value store that only holders of the job's secret can reach.

Runs in one process of the job, usually rank 0's barrier task or the process that starts the ranks. :class:`KeyValues`
holds the keys, the values and the clients that wait for each key; it uses no sockets and no threads. In
:class:`Coordinator` one thread serves all connections from an event loop; handshakes run in the listener's own thread
(see :mod:`~sparkdl.rendezvous.listener`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.closing import Closing
from sparkdl.rendezvous.dialing import give_up_undelivered
from sparkdl.rendezvous.frames import HEADER
from sparkdl.rendezvous.listener import AuthenticatedListener, strangers_allowed
from sparkdl.rendezvous.protocol import (
    MAX_FRAME_BYTES,
    Operation,
    Status,
    join_values,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


Answer = Callable[[bytes | None], None]
"""Called once: with the value of the key that was waited for, or with None when the time of the wait is over."""


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    unanswered: set[int]
    values: dict[int, bytes] = field(default_factory=dict)


class KeyValues:
    """Keys with their values, in the form of a c10d store: counters are decimal text.

    Attributes:
        values: the value of each key.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._exchanges: dict[str, _Exchange] = {}
        self._waits: dict[str, dict[int, Answer]] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._wait_numbers = itertools.count()

    def set(self, key: str, value: bytes) -> None:
        """Store a value and answer all clients that wait for it."""
        self.values[key] = value
        for answer in self._waits.pop(key, {}).values():
            answer(value)

    def wait(self, key: str, timeout_s: float, answer: Answer) -> Callable[[], object]:
        """Call ``answer`` once the key is set, or now if it is set; return a function that ends the wait."""
        if key in self.values:
            answer(self.values[key])
            return lambda: None
        return self._add_wait(key, timeout_s, answer)

    def exchange(
        self, key: str, rank: int, world_size: int, value: bytes, timeout_s: float, answer: Answer
    ) -> Callable[[], object]:
        """Call ``answer`` with the joined values of all ranks once the last rank has given its value.

        The returned function ends the wait, but keeps the value; the rank may ask again. The exchange is forgotten when
        all ranks have been answered.
        """
        exchange = self._exchanges.setdefault(key, _Exchange(unanswered=set(range(world_size))))
        exchange.values[rank] = value

        def deliver(joined: bytes | None) -> None:
            if joined is not None:
                exchange.unanswered.discard(rank)
            answer(joined)

        wait_key = f"{key}\0"  # clients cannot set such a key
        end_wait = self._add_wait(wait_key, timeout_s, deliver)
        if len(exchange.values) == world_size:
            joined = join_values([exchange.values[other] for other in sorted(exchange.values)])
            for waiting in self._waits.pop(wait_key).values():
                waiting(joined)
            if not exchange.unanswered:
                del self._exchanges[key]
        return end_wait

    def ranks_in(self, key: str) -> list[int]:
        """The ranks that have given their value to an exchange in progress."""
        return sorted(self._exchanges[key].values) if key in self._exchanges else []

    def _add_wait(self, key: str, timeout_s: float, answer: Answer) -> Callable[[], object]:
        number = next(self._wait_numbers)
        self._waits.setdefault(key, {})[number] = answer
        heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, number, key))
        return partial(self._forget, number, key)

    def expire(self) -> float | None:
        """Answer the waits whose time is over; return the seconds until the next wait ends, None without any."""
        while self._deadlines:
            end, number, key = self._deadlines[0]
            waiting = number in self._waits.get(key, {})
            remaining_s = end - time.monotonic()
            if waiting and remaining_s > 0:
                return remaining_s
            heapq.heappop(self._deadlines)
            if waiting and (answer := self._forget(number, key)) is not None:
                answer(None)
        return None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at zero and return its new value.

        Raises:
            ValueError: if the key holds something other than a number.
        """
        total = int(self.values.get(key, b"0")) + amount
        self.set(key, str(total).encode())
        return total

    def post(self, queue: str, value: bytes) -> int:
        """Set the next numbered key of a queue, ``queue/1`` being the first, and return its number."""
        number = self.add(f"{queue}/count", 1)
        self.set(f"{queue}/{number}", value)
        return number

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the key holds ``expected``, or is missing and ``expected`` is empty.

        Returns the value that the key holds afterwards; ``expected`` if the key is missing.
        """
        current = self.values.get(key)
        if current == expected or (current is None and not expected):
            self.set(key, desired)
            return desired
        return expected if current is None else current

    def _forget(self, number: int, key: str) -> Answer | None:
        waits = self._waits.get(key, {})
        answer = waits.pop(number, None)
        if not waits:
            self._waits.pop(key, None)
        return answer


PURPOSE = b"sparkdl coordinator"

_RECEIVE_BYTES = 1 << 20


class _Client:
    """One connection of the event loop, with its received data, its unsent answers and its waits."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.waits: dict[int, Callable[[], object]] = {}
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


class Coordinator(Closing):
    """Serves the rendezvous of one job from its construction until it is closed; a context manager.

    Args:
        secret: the job's secret; see :func:`sparkdl.rendezvous.handshake.new_secret`.
        world_size: number of ranks that will connect.
        host: address or addresses to bind; when None, those at which other machines reach this one, see
            :func:`~sparkdl.rendezvous.addresses.reachable_hosts`.

    Attributes:
        address: address at which clients reach the coordinator.
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
                # All ranks may connect at once.
                max_strangers=max(strangers_allowed(), 2 * world_size),
            )
        except BaseException:
            for resource in (self._selector, self._wake_in, self._wake_out):
                resource.close()
            raise
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._serve, name="sparkdl-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close all connections; clients that wait get an error. May be called again."""
        if self._closed.is_set():
            return
        self._listener.close()
        self._closed.set()
        self._wake_in.send(b"\0")
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()

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
            give_up_undelivered(client.sock)
            self._clients.add(client)
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
        except (ValueError, IndexError) as error:  # the content of a frame is damaged, or fields are missing
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
        begin: Callable[[Answer], Callable[[], object]],
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
            return b"0" if self._memory.values.pop(name, None) is None else b"1"
        elif kind == Operation.CHECK:
            return str(int(all(key in self._memory.values for key in names))).encode()
        elif kind == Operation.NUM_KEYS:
            return str(sum(key.startswith(name) for key in self._memory.values)).encode()
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
