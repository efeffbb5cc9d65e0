from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.rendezvous.protocol import Operation, pack, unpack


@given(st.integers(0, 2**64 - 1), st.sampled_from(list(Operation)), st.lists(st.binary(), max_size=20))
def test_message_survives_the_way_through_bytes(number: int, kind: Operation, fields: list[bytes]) -> None:
    assert unpack(pack(number, kind, fields)) == (number, kind, fields)


@given(st.binary(max_size=100))
def test_any_bytes_are_decoded_or_refused(message: bytes) -> None:
    try:
        number, kind, fields = unpack(message)
    except ValueError:
        return
    assert pack(number, kind, fields) == message


def test_cut_message_is_refused() -> None:
    message = pack(7, Operation.SET, [b"key", b"value"])
    for end in range(len(message)):
        with pytest.raises(ValueError):
            unpack(message[:end])
