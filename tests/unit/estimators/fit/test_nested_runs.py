"""The runs of searches, and the cleanup after an aborted search."""

from __future__ import annotations

import gc
import weakref

import mlflow
import pytest
from pyspark.ml.tuning import CrossValidator

from sparkdl.estimators import TorchEstimator
from sparkdl.estimators.fit.nested_runs import ALONE, nested_runs, options_of_single_run
from tests.servers.fresh_mlflow import tracked

__all__ = ["tracked"]


class Rows:
    """Stands for the rows that a search holds."""


class BrokenSearch(CrossValidator):
    """A search that fails in its first fold, with or without a failed fit."""

    def _fit(self, dataset):
        rows = Rows()
        self.seen = weakref.ref(rows)
        runs = nested_runs([self.getEstimator()] * 2)
        if self.breaks_in_a_fit:
            runs.end_as_failed()
        raise ArithmeticError("broken")


def test_aborted_search_ends_its_run_and_releases_its_rows(tracked):
    mlflow.set_tracking_uri(f"sqlite:///{tracked}/mlflow.db")
    mlflow.search_experiments()  # creates the database, which may exceed the time limit for runs of searches
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
    with options_of_single_run() as options:  # the next fit of any kind
        assert options == ALONE
    gc.collect()
    assert other.seen() is None
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert [(run.info.run_name, run.info.status) for run in runs] == [("BrokenSearch", "FAILED")] * 2
