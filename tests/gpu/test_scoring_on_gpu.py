"""What ``TorchModel.transform`` does on a GPU that Spark assigned to its task."""

from __future__ import annotations

import gc

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark import TaskContext
from pyspark.resource import ResourceInformation
from torch import nn

from sparkdl.estimators.scoring.udf import ScoringModel, load_predictor, score_batch
from tests.gpu.gpu_scenes import needs_gpu
from tests.training.signatures import make_signature, packed

pytestmark = [pytest.mark.gpu, needs_gpu]

TOLERANCE = 1e-4  # float32 on other hardware: other order of sums, fused multiply-add


@pytest.fixture
def task(monkeypatch):
    """Make this process look like a Python worker whose task has the first GPU."""
    monkeypatch.setattr(TaskContext, "_taskContext", None)
    context = TaskContext()  # pyspark makes it the current one
    context._resources = {"gpu": ResourceInformation("gpu", ["0"])}
    context._cpus = 1


def make_model(seed, kind, prediction_shape):
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 3)
    )
    return ScoringModel(*packed(layers), make_signature((48,), kind, prediction_shape), 16)


@pytest.mark.parametrize(("kind", "prediction_shape"), [("value", (3,)), ("class", ())])
def test_model_on_a_gpu_of_the_task_predicts_what_the_cpu_predicts(request, kind, prediction_shape):
    rows = np.random.default_rng(0).normal(size=(50, 48)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 48)
    gc.collect()  # tensors of other tests
    before = torch.cuda.memory_allocated()
    expected = score_batch(load_predictor(make_model(1, kind, prediction_shape)), (column,)).to_pylist()
    assert torch.cuda.memory_allocated() == before
    request.getfixturevalue("task")
    on_gpu = load_predictor(make_model(1, kind, prediction_shape))
    assert torch.cuda.memory_allocated() > before
    np.testing.assert_allclose(score_batch(on_gpu, (column,)).to_pylist(), expected, rtol=0, atol=TOLERANCE)
