from __future__ import annotations

import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import TrainingError
from sparkdl.launch.wire.messages import FOR_DRIVER, mark_lines, pack_error, split_mark, unpack_error
from sparkdl.launch.wire.outcome import Failure


@given(st.one_of(st.integers(0, 100), st.just(FOR_DRIVER)), st.text())
def test_every_line_of_a_marked_text_has_the_mark_and_is_otherwise_the_same(mark, text):
    lines = [split_mark(line) for line in mark_lines(mark, text).split("\n")]
    assert {found for found, _ in lines} == {str(mark)}
    assert [line for _, line in lines] == (text.splitlines() or [""])


@given(st.text(st.characters(exclude_characters="\x1e")))
def test_line_without_a_mark_is_unchanged(line):
    assert split_mark(line) == (None, line)


class NeedsTwoError(Exception):
    """An exception that can be pickled, but not unpickled."""

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


def test_error_is_unpacked_with_its_chain_of_causes():
    error = unpack_error(pack_error(chain(TrainingError("here"), ValueError("inside"), KeyError("deep"))))
    assert (str(error), str(error.__cause__)) == ("here", "inside")
    assert isinstance(error.__cause__.__cause__, KeyError)


def test_cause_that_cannot_be_pickled_ends_the_chain_before_it():
    for hindrance in (ValueError(threading.Lock()), NeedsTwoError(1, 2)):
        assert unpacked(TrainingError("here"), ValueError(), hindrance, KeyError()) == [
            TrainingError,
            ValueError,
        ]
        assert unpacked(hindrance) == []


def test_circular_causes_are_unpacked_once():
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert unpacked(first) == [ValueError, KeyError]


def test_failure_survives_json():
    failure = Failure(rank=2, host="a", error="LookupError: none", traceback="...", pickled=b"x")
    assert Failure.from_json(failure.to_json(), pickled=b"x") == failure
