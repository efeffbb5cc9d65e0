"""The formats of messages between the driver, the tasks and their ranks: frames, marked lines, errors, calls.

A message is a JSON header and a binary body; receiving one never unpickles it. Where a message crosses a network,
authentication happens before the first one.

A mark at the beginning of an output line of a rank holds the level of a log record, or marks a message meant for the
driver. A rank writes marks only if the process that started it has requested them. Marked lines keep their order among
all other lines that the rank prints; the process that shows the lines removes the marks. Nothing is inferred from the
text of a line.

An exception is packed with the exceptions that it was raised from, which pickling alone leaves out. The function that
runs on the ranks is pickled on the driver, and the error names what cannot be pickled.
"""

from __future__ import annotations

import json
import pickle
import re
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import cloudpickle

from sparkdl.errors import SerializationError
from sparkdl.rendezvous.frames import receive_frame, send_frame

MAX_MESSAGE_BYTES = 64 << 20
"""Largest size of a message; larger data is sent in chunks."""

CHUNK_BYTES = 4 << 20
"""Size of the chunks that results and function payloads are cut into."""

HEARTBEAT_S = 0.5
"""Seconds between two heartbeats of a rank to its task."""

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
            pass  # the peer has closed the connection first
        with self._sending:
            self._is_closed = True
            self._socket.close()


FOR_DRIVER = "driver"
"""Mark of a message for the driver, which is shown there even if other output is not."""

_SEPARATOR = "\x1e"
"""ASCII's record separator, which terminals do not show and texts do not contain."""

_MARKED = re.compile(f"{_SEPARATOR}([0-9]+|{FOR_DRIVER}){_SEPARATOR}")


def mark_lines(mark: int | str, text: str) -> str:
    """Return the text with a mark, the level of a record or :data:`FOR_DRIVER`, before each of its lines."""
    return "\n".join(f"{_SEPARATOR}{mark}{_SEPARATOR}{line}" for line in text.splitlines() or [""])


def split_mark(line: str) -> tuple[str | None, str]:
    """Return the mark of a line (None if it has none) and the line without it."""
    found = _MARKED.match(line)
    return (found[1], line[found.end() :]) if found else (None, line)


def error_text(error: BaseException) -> str:
    """Type and message of an exception, even if building its message fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return traceback.format_exception_only(type(error), error)[-1].strip()


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception and its causes, up to the first that cannot be pickled.

    Empty if the exception itself cannot be pickled.
    """
    packed: list[bytes] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        try:
            packed.append(cloudpickle.dumps(cause))
        except Exception:
            break  # the traceback shows it
        cause = cause.__cause__
    return pickle.dumps(packed) if packed else b""


def unpack_error(packed: bytes) -> BaseException | None:
    """Return the exception that :func:`pack_error` packed, with the causes that can be unpickled here.

    None if the exception itself cannot be unpickled, or was not packed. Only for bytes from a trusted channel:
    unpickling runs code.
    """
    errors: list[BaseException] = []
    for each in pickle.loads(packed) if packed else ():  # noqa: S301 - as the docstring says
        try:
            error = pickle.loads(each)  # noqa: S301 - likewise
        except Exception:
            break
        if not isinstance(error, BaseException):
            break
        errors.append(error)
    for outer, cause in pairwise(errors):
        outer.__cause__ = cause
    return errors[0] if errors else None


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call with everything it needs.

    Raises:
        SerializationError: if something cannot be pickled; the message names the function or the arguments.
    """
    try:
        payload: bytes = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:
        named = {"function": function, **{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs}
        culprits = [name for name, value in named.items() if not _can_be_pickled(value)]
        raise SerializationError(
            f"{', '.join(culprits) or 'The call'} cannot be pickled, so it cannot travel to the ranks: {error}. "
            "Create locks, connections and sessions inside the function instead."
        ) from error
    return payload


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
