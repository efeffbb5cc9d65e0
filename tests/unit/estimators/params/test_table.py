"""The table of Params: what one entry generates, and that estimators, constructors and the spec agree with it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import ClassVar, TypedDict

import pytest
from pyspark.ml.param import Params, TypeConverters

from sparkdl.errors import ParamError
from sparkdl.estimators import TorchEstimator
from sparkdl.estimators.params.base import CheckedParams
from sparkdl.estimators.params.estimator import ClassArguments, SharedArguments, _SharedParams
from sparkdl.estimators.params.table import (
    AsGiven,
    above,
    among,
    at_least,
    between,
    check_entries,
    entries_of,
    optional,
    param,
    spec_fields,
    with_arguments,
)
from sparkdl.training.spec import TrainingSpec
from tests.unit.estimators.public_classes import ESTIMATORS


class Example(CheckedParams):
    size, getSize, setSize = param(
        TypeConverters.toInt, "of something", default=3, check=at_least(1), field="size_of", more="Even."
    )
    rate, getRate, setRate = optional(TypeConverters.toFloat, "rate; default: none", check=above(0))
    made, getMade, setMade = optional(AsGiven[object](), "object", field="made")


class Larger(Example):
    _own_defaults: ClassVar = {"size": 5}

    def __init__(self) -> None:
        super().__init__()
        self._set_defaults()


def test_an_entry_makes_param_getter_setter_and_default():
    example = Larger()
    assert isinstance(example, Params)
    assert (example.size.name, example.size.doc, example.size.parent) == ("size", "of something", example.uid)
    assert (example.getSize(), example.getRate()) == (5, None)
    assert example.setSize(7).setRate(2) is example
    assert (example.getSize(), example.getRate()) == (7, 2.0)
    assert example.setSize(None).getSize() == 5
    assert (Larger.getSize.__name__, Larger.setRate.__doc__) == (
        "getSize",
        "Set ``rate``: rate; default: none.",
    )
    assert [entry.name for entry in entries_of(example) if entry.holds_object] == ["made"]


def test_an_entry_gives_the_field_of_the_spec():
    marker = object()
    assert spec_fields(Larger().setMade(marker)) == {"size_of": 5, "made": marker}


class Others(TypedDict, total=False):
    rate: float | None
    made: object


def test_an_entry_documents_the_argument_with_the_default_of_the_class():
    @with_arguments(Others, rate="as told here.")
    class Documented(Larger):
        """Something."""

        def __init__(self, *, size: int | None = None, **params: object) -> None:
            super().__init__()

    documentation = inspect.getdoc(Documented)
    assert documentation.startswith(
        "Something.\n\nArgs:\n    size: of something; default 5. Even.\n    rate: as told here."
    )
    arguments = inspect.signature(Documented).parameters
    assert [f"{name}: {each.annotation}" for name, each in arguments.items()] == [
        "size: int | None",
        "rate: float | None",
        "made: object",
    ]


@pytest.mark.parametrize(
    ("check", "good", "bad", "wanted"),
    [
        (at_least(1), [1, [1, 2]], [0, [2, 0], float("nan")], "at least 1"),
        (above(0), [0.1], [0, -1.0], "above 0"),
        (between(0, 1), [0.5], [0.0, 1.0, float("nan")], "above 0 and below 1"),
        (between(0, 1, has_low=True), [0.0], [1.0], "at least 0 and below 1"),
        (among(0, 1), [0, 1], [2], "0 or 1"),
    ],
)
def test_check_names_the_param_its_value_and_the_allowed_values(check, good, bad, wanted):
    for value in good:
        check(Example.size, value)
    for value in bad:
        with pytest.raises(ParamError) as caught:
            check(Example.size, value)
        assert str(caught.value) == f"Param size must be {wanted}, got {value}: of something."


def test_the_entries_of_an_instance_are_checked_where_they_have_a_value():
    check_entries(Larger())
    with pytest.raises(ParamError, match="Param rate must be above 0"):
        check_entries(Larger().setRate(0))


def test_shared_arguments_are_the_shared_params_and_the_params_that_hold_functions():
    shared = {entry.name for entry in entries_of(_SharedParams)}
    assert set(SharedArguments.__annotations__) == (shared - {"featuresCol"}) | {
        "scheduler",
        "metrics",
        "callbacks",
    }
    assert set(SharedArguments.__annotations__) < set(ClassArguments.__annotations__)


def test_params_match_the_entries_and_the_fields_of_the_spec():
    for make in ESTIMATORS.values():
        estimator = make()
        assert {entry.name for entry in entries_of(estimator)} == {each.name for each in estimator.params}
    fields = {field.name: field for field in dataclasses.fields(TrainingSpec)}
    for entry in entries_of(TorchEstimator):
        if entry.field is not None and "identity" not in fields[entry.field].metadata:
            first, *others = entry.field.split("_")
            spelled = "".join([first, *map(str.capitalize, others)])
            assert fields[entry.field].metadata.get("param", spelled) == entry.name  # the name in checkpoints
