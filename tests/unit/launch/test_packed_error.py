from __future__ import annotations

import threading
from itertools import pairwise

from sparkdl.errors import TrainingError
from sparkdl.launch.wire.messages import pack_error, unpack_error


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
