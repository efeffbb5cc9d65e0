from __future__ import annotations

import pytest

from tests.fresh_mlflow import tracked
from tests.spark.estimator_examples import make_frame

__all__ = ["tracked"]


@pytest.fixture(scope="session")
def frame(spark):
    return make_frame(spark).cache()
