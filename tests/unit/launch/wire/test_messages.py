from __future__ import annotations

import sys
import threading
import types
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import SerializationError, StandInError, TrainingError
from sparkdl.launch.wire.messages import (
    FOR_DRIVER,
    mark_lines,
    pack_error,
    pickle_call,
    split_mark,
    unpack_error,
)
from sparkdl.launch.wire.outcome import Failure


@given(st.one_of(st.integers(0, 100), st.just(FOR_DRIVER)), st.text())
def test_every_line_of_a_marked_text_has_the_mark_and_is_otherwise_the_same(mark, text):
    lines = [split_mark(line) for line in mark_lines(mark, text).split("\n")]
    assert {shown for shown, _ in lines} == {str(mark)}
    assert [line for _, line in lines] == (text.splitlines() or [""])


@given(st.text(st.characters(exclude_characters="\x1e")))
def test_line_without_a_mark_is_unchanged(line):
    assert split_mark(line) == (None, line)


class NeedsTwoError(Exception):
    """An exception that pickle alone can pickle, but not unpickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.second = second


class NeedsKeywordError(LookupError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code, self.lock = code, threading.Lock()


class RepeatsItsTextError(ValueError):
    """An exception that pickle alone unpickles with another text."""

    def __init__(self, what: str) -> None:
        super().__init__(f"no {what}")


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


@pytest.mark.parametrize(
    "error",
    [NeedsTwoError(1, 2), NeedsKeywordError(code=3), RepeatsItsTextError("rows"), OSError(2, "gone", "x")],
)
def test_error_of_any_constructor_is_unpacked_with_its_class_text_and_attributes(error):
    found = unpack_error(pack_error(chain(TrainingError("here"), error, KeyError("deep")))).__cause__
    assert (type(found), str(found), found.args) == (type(error), str(error), error.args)
    attributes = {name: value for name, value in vars(error).items() if name != "lock"}
    assert {name: value for name, value in vars(found).items() if name in attributes} == attributes
    assert isinstance(found.__cause__, KeyError)


def test_a_stand_in_shows_type_and_text_of_an_error_that_cannot_be_unpacked():
    assert unpacked(ValueError(threading.Lock()), KeyError()) == [StandInError, KeyError]
    of_elsewhere = type("NowhereError", (Exception,), {"__module__": "nowhere"})
    sys.modules["nowhere"] = types.ModuleType("nowhere")
    sys.modules["nowhere"].NowhereError = of_elsewhere
    try:
        packed = pack_error(chain(TrainingError("here"), of_elsewhere("text"), KeyError()))
    finally:
        del sys.modules["nowhere"]
    error = unpack_error(packed)
    assert str(error.__cause__) == "NowhereError: text"
    assert [type(cause) for cause in (error, error.__cause__, error.__cause__.__cause__)] == [
        TrainingError,
        StandInError,
        KeyError,
    ]


def test_a_broadcast_variable_is_refused_with_what_to_use_instead():
    broadcast = type("Broadcast", (), {"__module__": "pyspark.core.broadcast"})()
    with pytest.raises(SerializationError, match=r"^function cannot travel .* value = b\.value"):
        pickle_call(lambda: broadcast, (), {})
    with pytest.raises(SerializationError, match=r"^rows cannot travel .* value = b\.value"):
        pickle_call(len, (), {"rows": {"in": [broadcast]}})


def test_circular_causes_are_unpacked_once():
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert unpacked(first) == [ValueError, KeyError]


def test_failure_survives_json():
    failure = Failure(rank=2, host="a", error="LookupError: none", traceback="...", pickled=b"x")
    assert Failure.from_json(failure.to_json(), pickled=b"x") == failure
