from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from sparkdl.collective import Deadline
from sparkdl.rendezvous.frames import receive_frame, send_frame

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.mark.parametrize("payload", [b"", b"x", b"\x00" * 100_000])
def test_frame_arrives_as_it_was_sent(pair: Pair, payload: bytes) -> None:
    left, right = pair
    send_frame(left, payload)
    assert receive_frame(right, max_bytes=len(payload)) == payload


def test_frame_above_the_bound_is_refused_before_it_is_read(pair: Pair) -> None:
    left, right = pair
    left.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionAbortedError, match="4294967295 bytes"):
        receive_frame(right, max_bytes=1000)


def test_cut_frame_is_an_error(pair: Pair) -> None:
    left, right = pair
    left.sendall(b"\x00\x00\x00\x05abc")
    left.close()
    with pytest.raises(ConnectionError, match="3 of 5 bytes"):
        receive_frame(right, max_bytes=1000)


def test_frame_that_does_not_come_misses_its_deadline(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        receive_frame(pair[1], max_bytes=1000, deadline=Deadline(0.05))


def test_frame_that_is_not_taken_misses_its_deadline(pair: Pair) -> None:
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        send_frame(pair[0], b"\x00" * 10_000_000, deadline=Deadline(0.05))


def test_sending_keeps_the_timeout_of_the_socket(pair: Pair) -> None:
    left, right = pair
    left.settimeout(None)
    send_frame(left, b"x", deadline=Deadline(5.0))
    assert left.gettimeout() is None
    assert receive_frame(right, max_bytes=1) == b"x"
