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

import io
import json
import pickle
import re
import select
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import cloudpickle

from sparkdl.errors import SerializationError, StandInError
from sparkdl.rendezvous.dialing import is_unheard
from sparkdl.rendezvous.frames import receive_frame, send_frame

MAX_MESSAGE_BYTES = 64 << 20
"""Largest size of a message; larger data is sent in chunks."""

CHUNK_BYTES = 4 << 20
"""Size of the chunks that results and function payloads are cut into."""

HEARTBEAT_S = 0.5
"""Seconds between two heartbeats of a rank to its task."""

_LOOK_S = 5.0
"""Seconds between two checks whether the peer's machine still acknowledges."""

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

    def receive_while_heard(self) -> tuple[dict[str, Any], memoryview] | None:
        """As :meth:`receive`; also closes and returns None once the machine to which this end sends is gone.

        Threads that send may be blocked meanwhile, by a peer that reads slowly or by a machine that no longer exists.
        """
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLIN)
            while not poller.poll(1000 * _LOOK_S):
                if is_unheard(self._socket):
                    self.close()
                    return None
        except (OSError, ValueError):  # it is closed
            return None
        return self.receive()

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
    match = _MARKED.match(line)
    return (match[1], line[match.end() :]) if match else (None, line)


def error_text(error: BaseException) -> str:
    """Type and message of an exception, even if building its message fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return traceback.format_exception_only(type(error), error)[-1].strip()


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception and its causes, each with the text that stands for it where it cannot be unpickled."""
    packed: list[tuple[str, bytes]] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        packed.append((error_text(cause), _pickle_error(cause)))
        cause = cause.__cause__
    return pickle.dumps(packed)


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an exception; empty if that is impossible.

    By default an exception is unpickled by calling its class with ``args``, which are those of ``Exception.__init__``.
    If the class takes other arguments, or makes another text of these, the object is made without ``__init__``.
    """
    state = {name: value for name, value in vars(error).items() if _can_be_pickled(value)}
    for value in (error, (type(error), error.args, state)):
        with suppress(Exception):
            payload: bytes = cloudpickle.dumps(value)
            if error_text(_unpickle_error(payload)) == error_text(error):
                return payload
    return b""


def _unpickle_error(payload: bytes) -> BaseException:
    error = pickle.loads(payload)  # noqa: S301 - just pickled here, or as the docstring of unpack_error says
    if isinstance(error, BaseException):
        return error
    kind, args, state = error
    rebuilt: BaseException = kind.__new__(kind, *args)
    rebuilt.args = args
    vars(rebuilt).update(state)
    return rebuilt


def unpack_error(packed: bytes) -> BaseException | None:
    """Return the exception that :func:`pack_error` packed, with its causes; None if none was packed.

    A :class:`~sparkdl.errors.StandInError` with type and text stands for an exception that cannot be unpickled here,
    for example because the module of its class is missing. Only for bytes from a trusted channel: unpickling runs code.
    """
    entries = pickle.loads(packed) if packed else ()  # noqa: S301 - as the docstring says
    errors: list[BaseException] = []
    for text, payload in entries:
        try:
            errors.append(_unpickle_error(payload))
        except Exception:
            errors.append(StandInError(text))
    for outer, cause in pairwise(errors):
        outer.__cause__ = cause
    return errors[0] if errors else None


class _RankPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles what travels to the ranks, and refuses what would fail there."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind.__name__ == "Broadcast" and kind.__module__.startswith("pyspark."):
            raise SerializationError(
                "it uses a broadcast variable of Spark, which only Spark's own tasks can read. Outside of the "
                "function, take its value, as in value = b.value, and use that"
            )
        return super().reducer_override(obj)


def pickle_for_ranks(value: Any) -> bytes:
    """Pickle a value that travels to the ranks, by cloudpickle.

    Raises:
        Exception: any exception of cloudpickle, or of an object that cannot be pickled.
        SerializationError: if the value holds an object that can be pickled, but that ranks cannot use.
    """
    with io.BytesIO() as file:
        _RankPickler(file).dump(value)
        return file.getvalue()


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call with everything it needs.

    Raises:
        SerializationError: if something cannot be pickled; the message names the function or the arguments.
    """
    try:
        return pickle_for_ranks((function, args, kwargs))
    except Exception as error:
        named = {"function": function, **{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs}
        culprits = [name for name, value in named.items() if not _can_be_pickled(value)]
        what = ", ".join(culprits) or "The call"
        if isinstance(error, SerializationError):
            raise SerializationError(f"{what} cannot travel to the ranks: {error}.") from error
        raise SerializationError(
            f"{what} cannot be pickled, so it cannot travel to the ranks: {error}. "
            "Create locks, connections and sessions inside the function instead."
        ) from error


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle_for_ranks(value)
    except Exception:
        return False
    return True
