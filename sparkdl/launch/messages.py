"""Messages between the driver, the barrier tasks and their rank processes: a JSON header and a binary body.

Nothing here is ever unpickled. Authentication, where a message crosses a network, happens before the first one.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

from sparkdl.rendezvous.channel import receive_frame, send_frame

MAX_MESSAGE_BYTES = 64 << 20
"""No single message is larger; what is, travels in chunks."""

CHUNK_BYTES = 4 << 20
"""Size of the chunks that results and function payloads are cut into."""

_HEADER_LENGTH = struct.Struct("!I")


class MessageConnection:
    """One end of a connected stream socket; sending is safe from several threads, receiving from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._is_closed = False

    def send(self, header: dict[str, Any], body: bytes | memoryview = b"") -> None:
        """Send one message.

        Raises:
            OSError: if the peer is gone, or the connection was closed.
        """
        text = json.dumps(header).encode()
        frame = b"".join((_HEADER_LENGTH.pack(len(text)), text, body))
        with self._sending:
            if self._is_closed:
                raise ConnectionAbortedError("the connection was closed")
            send_frame(self._socket, frame)

    def receive(self) -> tuple[dict[str, Any], memoryview] | None:
        """Wait for the next message, however long it takes; None when the peer has closed or is gone."""
        try:
            frame = receive_frame(self._socket, max_bytes=MAX_MESSAGE_BYTES)
        except OSError:
            return None
        view = memoryview(frame)
        (length,) = _HEADER_LENGTH.unpack_from(view)
        start = _HEADER_LENGTH.size + length
        return json.loads(bytes(view[_HEADER_LENGTH.size : start])), view[start:]

    def close(self) -> None:
        """Close the socket in both directions, which wakes threads that wait in ``receive`` and ``send``."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        with self._sending:
            self._is_closed = True
            self._socket.close()
