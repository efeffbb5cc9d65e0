"""The runs of searches, and what is left of a search that broke off."""

from __future__ import annotations

import gc
import weakref

import mlflow
import pytest
from pyspark.ml.tuning import CrossValidator

from sparkdl.estimators import TorchEstimator
from sparkdl.estimators.fit.runs import ALONE, nested_runs, place_of_single_fit
from tests.fresh_mlflow import tracked

__all__ = ["tracked"]


class Rows:
    """What a search has in its hands."""


class BrokenSearch(CrossValidator):
    """Breaks off in its first fold, in a fit or beside one."""

    def _fit(self, dataset):
        rows = Rows()
        self.seen = weakref.ref(rows)
        runs = nested_runs([self.getEstimator()] * 2)
        if self.breaks_in_a_fit:
            runs.end_as_failed()
        raise ArithmeticError("broken")


def test_a_search_that_broke_off_ends_its_run_and_lets_go_of_its_rows(tracked):
    mlflow.set_tracking_uri(f"sqlite:///{tracked}/mlflow.db")
    mlflow.search_experiments()  # makes the database, which may take longer than runs of searches are waited for
    estimator = TorchEstimator(tracking="on", store=str(tracked / "store"))

    def search(*, breaks_in_a_fit):
        made = BrokenSearch(estimator=estimator)
        made.breaks_in_a_fit = breaks_in_a_fit
        with pytest.raises(ArithmeticError):
            made._fit(None)
        gc.collect()
        return made

    assert search(breaks_in_a_fit=True).seen() is None
    other = search(breaks_in_a_fit=False)
    with place_of_single_fit() as place:  # the next fit, whatever it is
        assert place == ALONE
    gc.collect()
    assert other.seen() is None
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert [(run.info.run_name, run.info.status) for run in runs] == [("BrokenSearch", "FAILED")] * 2
