"""A rank's connection to the coordinator. Runs on ranks and in their launchers.

One connection serves all threads: requests carry numbers, and one reader thread hands each answer to the thread that
waits for it, so that a long ``get`` of one thread does not block a ``set`` of another.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from sparkdl.closing import Closing
from sparkdl.errors import CommunicatorError
from sparkdl.rendezvous.addresses import is_local
from sparkdl.rendezvous.coordinator import PURPOSE
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.dialing import connect_authenticated, give_up_undelivered
from sparkdl.rendezvous.frames import receive_frame, send_frame
from sparkdl.rendezvous.protocol import (
    MAX_FRAME_BYTES,
    MAX_VALUE_BYTES,
    Operation,
    Status,
    cut_values,
    pack,
    unpack,
)
from sparkdl.rendezvous.store import Rendezvous, time_for_answers_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.rendezvous.addresses import Address

_ANSWER_TIMEOUT_S = 60.0
"""How long the coordinator may take to answer a request that involves no wait."""

_LEAST_PATIENCE_S = 1.0
"""Timeout of a request whose caller's deadline has passed, as in the cleanup after a communicator opened too late."""

_GRACE_S = 5.0
"""How long after its deadline a wait may be answered: the coordinator says at the deadline which ranks are late."""

_GOODBYE_TIMEOUT_S = 5.0


class RendezvousClient(Rendezvous, Closing):
    """A :class:`~sparkdl.rendezvous.store.Rendezvous` that a coordinator serves; a context manager.

    Create it with :meth:`connect`. Its views use the same connection.
    """

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self._sock = sock
        self.address = address
        self._hosts_here = _hosts_here(sock, address)
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[tuple[int, list[bytes]]]] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._ended: list[str] = []
        """Why the connection has ended; empty before. A list, as views share it."""
        self._reader = threading.Thread(target=self._read, name="sparkdl-rendezvous", daemon=True)
        self._reader.start()

    @classmethod
    def connect(cls, address: Address, secret: bytes, timeout_s: float) -> RendezvousClient:
        """Connect to the coordinator at ``address``.

        Raises:
            AuthenticationError: if the coordinator has another secret.
            ConnectionError: if it cannot be reached; the message lists what was tried.
        """
        sock = connect_authenticated(address, secret, purpose=PURPOSE, timeout_s=timeout_s)
        give_up_undelivered(sock)
        return cls(sock, address)

    def set(self, key: str, value: bytes) -> None:
        """See :class:`Rendezvous`."""
        if len(value) > MAX_VALUE_BYTES:
            raise CommunicatorError(
                f"value of {key!r} has {len(value)} bytes; the rendezvous keeps at most {MAX_VALUE_BYTES}."
                " Send large data through a communicator."
            )
        self._ask(Operation.SET, self._encode(key), bytes(value))

    def add(self, key: str, amount: int) -> int:
        """See :class:`Rendezvous`."""
        return int(self._ask(Operation.ADD, self._encode(key), str(amount).encode()))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See :class:`Rendezvous`."""
        return self._ask(Operation.COMPARE_SET, self._encode(key), expected, desired)

    def delete(self, key: str) -> bool:
        """See :class:`Rendezvous`."""
        return self._ask(Operation.DELETE, self._encode(key)) == b"1"

    def num_keys(self) -> int:
        """See :class:`Rendezvous`."""
        return int(self._ask(Operation.NUM_KEYS, self._encode("")))

    def post(self, queue: str, value: bytes) -> int:
        """See :class:`Rendezvous`."""
        return int(self._ask(Operation.POST, self._encode(queue), value))

    def post_if_lost(self, queue: str, value: bytes) -> None:
        """See :class:`Rendezvous`."""
        self._ask(Operation.POST_IF_LOST, self._encode(queue), value)

    def _are_set(self, keys: Sequence[str]) -> bool:
        return self._ask(Operation.CHECK, *map(self._encode, keys)) == b"1"

    def _wait_for(self, key: str, timeout_s: float) -> bytes | None:
        status, fields = self._request(
            Operation.GET,
            self._encode(key),
            str(max(0, round(timeout_s * 1000))).encode(),
            patience_s=timeout_s + _ANSWER_TIMEOUT_S,
        )
        return None if status == Status.LATE else fields[0]

    def _exchange(
        self, key: str, rank: int, world_size: int, value: bytes, timeout_s: float
    ) -> list[bytes] | frozenset[int]:
        if len(value) * world_size > MAX_VALUE_BYTES:
            raise CommunicatorError(
                f"rank {rank}'s value of {key!r} has {len(value)} bytes; with {world_size} ranks, a value may have"
                f" {MAX_VALUE_BYTES // world_size} bytes. Send large data through a communicator."
            )
        numbers = (rank, world_size, max(0, round(timeout_s * 1000)))
        number_fields = [str(number).encode() for number in numbers]
        status, fields = self._request(
            Operation.EXCHANGE,
            *(self._encode(key), *number_fields[:2], bytes(value), number_fields[2]),
            patience_s=timeout_s + _ANSWER_TIMEOUT_S,
        )
        return frozenset(int(field) for field in fields) if status == Status.LATE else cut_values(fields[0])

    def hosts_here(self) -> tuple[str, ...]:
        """See :class:`Rendezvous`.

        On the coordinator's machine, these are the coordinator's published addresses that belong to this machine, as
        other machines use them. On any other machine, this is the local address of the connection to the coordinator.
        """
        return self._hosts_here

    def close(self) -> None:
        """Say goodbye and close; waits of other threads end with an error. May be called again."""
        # An error means that this client was closed before, or that the coordinator is gone.
        with contextlib.suppress(CommunicatorError):
            self._request(Operation.GOODBYE, patience_s=_GOODBYE_TIMEOUT_S)
        self._end("this rank closed its rendezvous")
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._sock.close()

    def _encode(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    def _ask(self, operation: Operation, *fields: bytes) -> bytes:
        patience_s = max(_LEAST_PATIENCE_S, time_for_answers_s(_ANSWER_TIMEOUT_S))
        status, answer = self._request(operation, *fields, patience_s=patience_s)
        if status == Status.REFUSED:
            raise CommunicatorError(f"the coordinator refused {operation.name}: {answer[0].decode()}")
        return answer[0]

    def _request(self, operation: Operation, *fields: bytes, patience_s: float) -> tuple[int, list[bytes]]:
        future: Future[tuple[int, list[bytes]]] = Future()
        deadline = Deadline(min(patience_s, time_for_answers_s(patience_s) + _GRACE_S))
        with self._lock:
            if self._ended:
                raise CommunicatorError(f"{operation.name} is not possible: {self._ended[0]}")
            number = next(self._numbers)
            self._answers[number] = future
        try:
            self._send(pack(number, operation, fields), deadline)
        except OSError as error:
            self._end(f"lost the connection to the coordinator: {error}")
            raise CommunicatorError(f"{operation.name} failed: {self._ended[0]}") from error
        try:
            return future.result(deadline.remaining_s())
        except FutureTimeoutError:
            with self._lock:
                self._answers.pop(number, None)
            raise CommunicatorError(
                f"the coordinator at {self.address} did not answer {operation.name}"
                f" within {deadline.timeout_s:g} s; its process or machine hangs, or this one is cut off from it"
            ) from None

    def _send(self, message: bytes, deadline: Deadline) -> None:
        if not self._sending.acquire(timeout=deadline.remaining_s()):
            raise TimeoutError(f"another thread could not send for {deadline.timeout_s:g} s")
        try:
            send_frame(self._sock, message, deadline=deadline)
        finally:
            self._sending.release()

    def _read(self) -> None:
        try:
            while True:
                number, status, fields = unpack(receive_frame(self._sock, max_bytes=MAX_FRAME_BYTES))
                with self._lock:
                    future = self._answers.pop(number, None)
                if future is not None:
                    future.set_result((status, fields))
        except (OSError, ValueError) as error:
            self._end(f"lost the connection to the coordinator at {self.address}: {error}")

    def _end(self, reason: str) -> None:
        with self._lock:
            self._ended.append(reason)
            futures = list(self._answers.values())
            self._answers.clear()
        for future in futures:
            future.set_exception(CommunicatorError(self._ended[0]))


def _hosts_here(sock: socket.socket, address: Address) -> tuple[str, ...]:
    if sock.family == socket.AF_UNIX:
        return ()
    here, there = sock.getsockname()[0], sock.getpeername()[0]
    return tuple(host for host in address.hosts if is_local(host)) if here == there else (here,)
