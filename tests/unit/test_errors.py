from __future__ import annotations

import inspect
import pickle

import pytest

from sparkdl import errors
from sparkdl.errors import RankError, SparkdlError

CLASSES = [member for _, member in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_a_sparkdl_error_and_says_what_to_do(error: type[SparkdlError]) -> None:
    assert issubclass(error, SparkdlError)
    assert error.__doc__


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ParamError, ValueError),
        (errors.DataError, ValueError),
        (errors.StoreError, OSError),
        (errors.SerializationError, TypeError),
        (errors.TransportUnavailableError, ImportError),
        (errors.AuthenticationError, ConnectionError),
        (errors.CommunicatorTimeoutError, TimeoutError),
        (errors.RankLostError, ConnectionError),
    ],
)
def test_error_can_be_caught_as_its_builtin_relative(
    error: type[SparkdlError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin):
        raise error("what happened")


@pytest.mark.parametrize("error", [cls for cls in CLASSES if not issubclass(cls, RankError)])
def test_error_survives_pickling_on_its_way_from_a_rank(error: type[SparkdlError]) -> None:
    again = pickle.loads(pickle.dumps(error("message")))
    assert type(again) is error
    assert str(again) == "message"


@pytest.mark.parametrize("error", [cls for cls in CLASSES if issubclass(cls, RankError)])
def test_error_of_a_rank_keeps_everything_when_it_is_pickled(error: type[RankError]) -> None:
    first = error("message", rank=3, host="b", traceback_text="line 1").at("epoch 2")
    again = pickle.loads(pickle.dumps(first))
    assert type(again) is error
    assert (again.args, vars(again)) == (first.args, vars(first))
