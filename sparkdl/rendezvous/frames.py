"""Frames: byte strings preceded by their length, on a stream socket.

The receiver limits the length, and with it the memory that a peer can make it allocate. The content of a frame is not
interpreted here, and no module of this package unpickles one. Runs on drivers, barrier tasks and ranks.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.rendezvous.deadline import Deadline

HEADER = struct.Struct("!I")
"""Length of the payload in bytes, four bytes in network order."""


def send_frame(sock: socket.socket, payload: bytes, *, deadline: Deadline | None = None) -> None:
    """Send the length of ``payload`` and ``payload``; another thread may receive from the socket meanwhile.

    Raises:
        TimeoutError: if the peer does not take all of it before the deadline; later frames would be misread.
        OSError: if the connection is lost, or was closed on this side.
    """
    unsent = memoryview(HEADER.pack(len(payload)) + payload)
    # Waits by select: the socket has one timeout, which belongs to the receiving thread.
    poller = select.poll()
    try:
        poller.register(sock, select.POLLOUT)
    except ValueError as error:  # it has no descriptor any more: another thread closed it
        raise ConnectionAbortedError("this side closed the connection") from error
    while unsent:
        if not poller.poll(None if deadline is None else 1000 * deadline.remaining_s()):
            assert deadline is not None
            raise TimeoutError(f"peer took nothing for {deadline.timeout_s:g} s")
        with contextlib.suppress(BlockingIOError):
            unsent = unsent[sock.send(unsent, socket.MSG_DONTWAIT) :]


def receive_frame(sock: socket.socket, *, max_bytes: int, deadline: Deadline | None = None) -> bytes:
    """Receive the payload of the next frame.

    Raises:
        TimeoutError: if the frame is not complete before the deadline.
        ConnectionError: if the peer closes the connection, or announces more than ``max_bytes``; the payload is then
            not read.
    """
    (length,) = HEADER.unpack(receive_exactly(sock, HEADER.size, deadline=deadline))
    if length > max_bytes:
        raise ConnectionAbortedError(f"peer announced a frame of {length} bytes; {max_bytes} are allowed")
    return receive_exactly(sock, length, deadline=deadline)


def receive_exactly(sock: socket.socket, num_bytes: int, *, deadline: Deadline | None = None) -> bytes:
    """Receive exactly ``num_bytes`` bytes; the deadline holds for all of them together.

    Raises:
        TimeoutError: if they do not arrive before the deadline.
        ConnectionError: if the peer closes the connection before they have arrived.
    """
    received = bytearray()
    while len(received) < num_bytes:
        _limit(sock, deadline)
        piece = sock.recv(min(num_bytes - len(received), 1 << 20))
        if not piece:
            raise ConnectionResetError(
                f"peer closed the connection after {len(received)} of {num_bytes} bytes"
            )
        received += piece
    return bytes(received)


def _limit(sock: socket.socket, deadline: Deadline | None) -> None:
    if deadline is None:
        sock.settimeout(None)
        return
    if deadline.expired:
        raise TimeoutError(f"peer was silent for {deadline.timeout_s:g} s")
    sock.settimeout(max(deadline.remaining_s(), 1e-3))
