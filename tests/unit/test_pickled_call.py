from __future__ import annotations

import fractions
import pickle
from functools import partial

from tests.pickled_call import pickle_call
from tests.processes import is_running
from tests.unit import test_pickled_call


def add(one: object, other: object) -> tuple[object, object]:
    return one, other


def test_call_comes_back_as_it_was_with_the_modules_of_all_functions_and_classes_in_it() -> None:
    half = fractions.Fraction(1, 2)
    call, modules = pickle_call(partial(add, half), ([is_running],))
    fn, args = pickle.loads(call)
    assert fn(*args) == (half, [is_running])
    assert modules >= {test_pickled_call.__name__, "fractions", "tests.processes"}
