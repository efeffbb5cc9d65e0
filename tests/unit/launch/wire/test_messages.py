from __future__ import annotations

import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import TrainingError
from sparkdl.launch.wire.messages import FOR_DRIVER, mark_lines, pack_error, split_mark, unpack_error


@given(st.one_of(st.integers(0, 100), st.just(FOR_DRIVER)), st.text())
def test_every_line_of_a_marked_text_has_the_mark_and_is_otherwise_the_same(mark, text):
    lines = [split_mark(line) for line in mark_lines(mark, text).split("\n")]
    assert {found for found, _ in lines} == {str(mark)}
    assert [line for _, line in lines] == (text.splitlines() or [""])


@given(st.text(st.characters(exclude_characters="\x1e")))
def test_what_has_no_mark_stays_as_it_is(line):
    assert split_mark(line) == (None, line)


class NeedsTwoError(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


def chain(*errors: BaseException) -> BaseException:
    for outer, cause in pairwise(errors):
        outer.__cause__ = cause
    return errors[0]


def unpacked(*errors: BaseException) -> list[type[BaseException]]:
    error = unpack_error(pack_error(chain(*errors)))
    found = []
    while error is not None:
        found.append(type(error))
        error = error.__cause__
    return found


def test_an_error_travels_with_all_that_it_was_raised_from():
    error = unpack_error(pack_error(chain(TrainingError("here"), ValueError("inside"), KeyError("deep"))))
    assert (str(error), str(error.__cause__)) == ("here", "inside")
    assert isinstance(error.__cause__.__cause__, KeyError)


def test_a_cause_that_cannot_travel_leaves_the_errors_before_it():
    for hindrance in (ValueError(threading.Lock()), NeedsTwoError(1, 2)):
        assert unpacked(TrainingError("here"), ValueError(), hindrance, KeyError()) == [
            TrainingError,
            ValueError,
        ]
        assert unpacked(hindrance) == []


def test_errors_that_are_causes_of_each_other_come_to_an_end():
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert unpacked(first) == [ValueError, KeyError]
