"""Metrics of an evaluation, from the weights of rows by class and score."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from sparkdl.estimators import ClassificationEvaluation


def test_rows_of_weight_0_are_no_points_of_the_curves():
    scored = np.array([[0.0, 0.0, 1.5, 0.0, 2.0], [0.0, 2.0, 0.5, 0.0, 1.0]])  # by descending score
    found = ClassificationEvaluation(
        labels=(0, 1), numInstances=10, confusion=np.ones((2, 2)), numLeftOut=0, _scored=scored
    )
    labels, scores = np.repeat([0, 1], 5), np.tile(-np.arange(5.0), 2)
    assert found.areaUnderROC == pytest.approx(
        metrics.roc_auc_score(labels, scores, sample_weight=scored.ravel())
    )
    without = ClassificationEvaluation(
        labels=(0, 1), numInstances=6, confusion=np.ones((2, 2)), numLeftOut=0, _scored=scored[:, [1, 2, 4]]
    )
    assert found.metrics == without.metrics
