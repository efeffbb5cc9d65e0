"""The table of Params: its checks and documentation, and that estimators and the spec agree with it."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from pyspark.ml.param import TypeConverters

from sparkdl.errors import ParamError
from sparkdl.estimators import ImageClassifier, TorchEstimator
from sparkdl.estimators.params.table import Entry, above, at_least, between, entries_of
from sparkdl.training.spec import TrainingSpec
from tests.unit.estimators.public_classes import ESTIMATORS

EPOCHS = TorchEstimator.epochs


def test_arguments_are_documented_with_the_default_of_their_class_or_in_its_own_words():
    documentation = inspect.getdoc(ImageClassifier)
    assert f"\n    epochs: {EPOCHS.doc}; default 20.\n" in documentation
    assert '\n    featuresCol: column of images; default ``"features"``.\n' in documentation
    assert Entry(TypeConverters.toInt, "of it", more="Even.").explanation(2.5) == "of it; default 2.5. Even."


@pytest.mark.parametrize(
    ("check", "good", "bad", "wanted"),
    [
        (at_least(1), [1, [1, 2]], [0, [2, 0], float("nan")], "at least 1"),
        (above(0), [0.1], [0, -1.0], "above 0"),
        (between(0, 1), [0.5], [0.0, 1.0, float("nan")], "above 0 and below 1"),
        (between(0, 1, has_low=True), [0.0], [1.0], "at least 0 and below 1"),
    ],
)
def test_check_names_the_param_its_value_and_the_allowed_values(check, good, bad, wanted):
    for value in good:
        check(EPOCHS, value)
    for value in bad:
        with pytest.raises(ParamError) as caught:
            check(EPOCHS, value)
        assert str(caught.value) == f"Param epochs must be {wanted}, got {value}: {EPOCHS.doc}."


def test_params_match_the_entries_and_the_fields_of_the_spec():
    for make in ESTIMATORS.values():
        estimator = make()
        assert {entry.name for entry in entries_of(estimator)} == {param.name for param in estimator.params}
    fields = {field.name: field for field in dataclasses.fields(TrainingSpec)}
    for entry in entries_of(TorchEstimator):
        if entry.field is not None and "identity" not in fields[entry.field].metadata:
            first, *others = entry.field.split("_")
            spelled = "".join([first, *map(str.capitalize, others)])
            assert fields[entry.field].metadata.get("param", spelled) == entry.name  # the name in checkpoints
