"""Encoding of the requests to the coordinator and of its answers: a fixed header, then fields preceded by lengths."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_VALUE_BYTES = 64 << 20
"""Largest value that the coordinator keeps."""

MAX_FRAME_BYTES = MAX_VALUE_BYTES + (1 << 20)
"""Largest frame between a client and the coordinator: a value, its key and the header."""

_HEADER = struct.Struct("!QBH")
_LENGTH = struct.Struct("!I")


class Operation(IntEnum):
    """Kinds of requests of a client; the fields of each are in brackets."""

    SET = 1
    """[key, value]"""
    GET = 2
    """[key, milliseconds]: answered when the key is set, or with LATE after that time"""
    ADD = 3
    """[key, amount]"""
    COMPARE_SET = 4
    """[key, expected, desired]"""
    DELETE = 5
    """[key]"""
    CHECK = 6
    """[key, ...]"""
    NUM_KEYS = 7
    """[prefix]"""
    POST_IF_LOST = 8
    """[queue, value]: set the next numbered key of the queue if this connection ends without GOODBYE; an empty value
    cancels this"""
    GOODBYE = 9
    """[]"""
    EXCHANGE = 10
    """[key, rank, world size, value, milliseconds]: answered with the joined values once all ranks have given theirs,
    or with LATE after that time and the numbers of the ranks that have"""
    POST = 11
    """[queue, value]: set the next numbered key of the queue; answered with its number"""


class Status(IntEnum):
    """How a request ended."""

    DONE = 0
    LATE = 1
    REFUSED = 2


def pack(request_id: int, kind: int, fields: Sequence[bytes]) -> bytes:
    """Encode a request (``kind`` an :class:`Operation`) or an answer (a :class:`Status`)."""
    parts = [_HEADER.pack(request_id, kind, len(fields))]
    for field in fields:
        parts += (_LENGTH.pack(len(field)), field)
    return b"".join(parts)


def unpack(message: bytes) -> tuple[int, int, list[bytes]]:
    """Decode the output of :func:`pack` into request id, kind and fields.

    Raises:
        ValueError: if the message is damaged.
    """
    try:
        request_id, kind, num_fields = _HEADER.unpack_from(message)
        position, fields = _HEADER.size, []
        for _ in range(num_fields):
            (length,) = _LENGTH.unpack_from(message, position)
            position += _LENGTH.size
            fields.append(message[position : position + length])
            position += length
    except struct.error as error:
        raise ValueError(f"damaged message of {len(message)} bytes") from error
    if position != len(message):
        raise ValueError(f"damaged message of {len(message)} bytes: its fields end at byte {position}")
    return request_id, kind, fields


def join_values(values: Sequence[bytes]) -> bytes:
    """Encode several values as one."""
    return b"".join(_LENGTH.pack(len(value)) + value for value in values)


def cut_values(joined: bytes) -> list[bytes]:
    """Decode the output of :func:`join_values`."""
    values, position = [], 0
    while position < len(joined):
        (length,) = _LENGTH.unpack_from(joined, position)
        position += _LENGTH.size + length
        values.append(joined[position - length : position])
    return values
