"""Models and estimators saved before modules were merged and moved can be loaded by the old names of their classes.

``tests/saved_before`` holds folders saved by the older code, the rows on which models were fitted, and predictions.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparkdl.estimators import TorchClassifier, TorchEstimator, TorchModel
from sparkdl.old_names import OLD_NAMES

pytestmark = pytest.mark.any_spark_will_do

SAVED = Path(__file__).parents[2] / "saved_before"
PREDICTIONS = json.loads((SAVED / "predictions.json").read_text())


def load(name: str) -> Any:
    """Load as Spark's readers do: by the class name in the metadata."""
    (metadata,) = (SAVED / name / "metadata").glob("part-*")
    module, _, of_class = json.loads(metadata.read_text())["class"].rpartition(".")
    return getattr(importlib.import_module(module), of_class).load(f"file://{SAVED / name}")


@pytest.fixture(scope="module")
def rows(spark):
    return spark.read.parquet(f"file://{SAVED / 'rows'}")


@pytest.mark.parametrize("name", PREDICTIONS)
def test_model_saved_by_an_older_version_gives_the_same_predictions(rows, name):
    scored = load(name).transform(rows.orderBy("a").limit(4)).select("prediction").collect()
    predictions = [row["prediction"] for row in scored]
    expected = PREDICTIONS[name]
    assert predictions == (expected if isinstance(expected[0], str) else pytest.approx(expected, rel=1e-5))


def test_an_estimator_with_pickled_functions_fits(rows):
    estimator = load("estimator")
    assert isinstance(estimator, TorchEstimator)
    assert isinstance(estimator.fit(rows), TorchModel)


def test_fit_resumes_from_a_checkpoint_of_an_older_version(rows, tmp_path):
    shutil.copytree(SAVED / "checkpoints", tmp_path / "checkpoints")
    estimator = load("classifier_estimator")
    assert isinstance(estimator, TorchClassifier)
    estimator.setEpochs(2)
    resumed = estimator.copy().setCheckpointDir(f"file://{tmp_path / 'checkpoints'}").fit(rows)
    whole = estimator.copy().setCheckpointDir(f"file://{tmp_path / 'others'}").fit(rows)
    losses = [epoch.loss for epoch in whole.summary.history]
    assert [epoch.loss for epoch in resumed.summary.history] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_module_name_imports_the_current_module(name):
    module = importlib.import_module(name)
    assert module is importlib.import_module(OLD_NAMES[name])
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == OLD_NAMES[name]
