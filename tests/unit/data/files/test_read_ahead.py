from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from sparkdl.data.files.threads import ReadAhead
from sparkdl.errors import DataError


def counting(made: list[int], stop: int, closed: threading.Event) -> Generator[int, None, None]:
    try:
        for number in range(stop):
            made.append(number)
            yield number
    finally:
        closed.set()


def test_items_come_in_their_order_and_the_source_is_closed() -> None:
    closed = threading.Event()
    ahead = ReadAhead(counting([], 100, closed), 3, "test")
    assert list(ahead) == list(range(100))
    assert closed.wait(10)
    ahead.close()


def test_no_more_items_are_read_ahead_than_allowed() -> None:
    made: list[int] = []
    closed = threading.Event()
    ahead = ReadAhead(counting(made, 100, closed), 2, "test")
    for taken in range(5):
        assert next(ahead) == taken
        assert len(made) <= taken + 1 + 2 + 1  # the waiting items, and one that the thread holds
    ahead.close()
    assert closed.is_set()
    assert len(made) <= 8


def test_error_is_raised_in_place_of_the_item_that_failed() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        yield 2
        raise ValueError("no third")

    ahead = ReadAhead(failing(), 5, "test")
    assert [next(ahead), next(ahead)] == [1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="no third"):
            next(ahead)
    ahead.close()


def test_closing_ends_a_thread_that_waits_for_room() -> None:
    closed = threading.Event()
    ahead = ReadAhead(counting([], 100, closed), 1, "reader under test")
    assert next(ahead) == 0
    ahead.close()
    assert closed.is_set()
    with pytest.raises(DataError, match="closed while an epoch was being read"):
        list(ahead)
    assert not any(thread.name == "reader under test" for thread in threading.enumerate())


@pytest.mark.parametrize(("max_bytes", "most"), [(40, 4), (39, 3), (10, 1), (1, 1)])
def test_items_read_ahead_stay_within_the_byte_limit(max_bytes: int, most: int) -> None:
    taken, ahead_of_taken, begun = 0, [], threading.Semaphore(0)

    def items() -> Generator[int, None, None]:
        for number in range(20):
            ahead_of_taken.append(number + 1 - taken)  # including this one, which is being made
            begun.release()
            yield number

    ahead = ReadAhead(items(), 100, "test", max_bytes=max_bytes, bytes_of=lambda _: 10)
    for number in range(20):
        for _ in range(most if not number else number + most <= 20):
            assert begun.acquire(timeout=60), "it runs ahead as far as it may"
        taken += 1  # before next(): the thread may continue at once
        assert next(ahead) == number
    assert max(ahead_of_taken) <= most
    ahead.close()
