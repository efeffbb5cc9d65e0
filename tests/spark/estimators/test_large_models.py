"""Models with weights too large for a broadcast and for 32-bit sizes, on their way through Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.data import Column
from sparkdl.estimators import TorchEstimator, TorchModel
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from tests.memory_watch import memory_watched

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MIB = 1 << 20
WIDTH = 256


class Words(nn.Module):
    """An embedding followed by a sum over its outputs."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        rows = num_bytes // (4 * WIDTH)
        self.embedding = nn.Embedding(rows, WIDTH, _weight=torch.zeros(rows, WIDTH))
        with torch.no_grad():
            self.embedding.weight[:, 0] = torch.arange(rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids.reshape(-1)).sum(dim=1)


def frame_of(spark: SparkSession, module: Words) -> DataFrame:
    """Rows that use the beginning and the end of the embedding."""
    last = module.embedding.num_embeddings - 1
    return spark.range(0, 64, 1, 2).selectExpr(f"{last} * (id % 2) - (id % 2) * id AS ids", "0D AS label")


def predictions(model: TorchModel, frame: DataFrame) -> list[tuple[int, float]]:
    return sorted((row["ids"], row["prediction"]) for row in model.transform(frame).collect())


@pytest.mark.slow_elsewhere
@pytest.mark.no_cluster_needed
def test_weights_too_large_for_a_broadcast_reach_the_executors_as_a_file(spark: SparkSession) -> None:
    module = Words(100 * MIB)
    column = Column(name="ids", dtype="int64")
    inputs = ModelInputs(columns=(column,), inputs=(ModelInput(name="ids", dtype="int64"),))
    signature = ModelSignature(inputs=inputs, outputs=(ModelOutput(name="label", kind="value", shape=()),))
    model = TorchModel(SavedModel(module, signature)).setFeaturesCol("ids")
    frame = frame_of(spark, module)
    with memory_watched() as found:
        given = predictions(model, frame)
        again = predictions(model.copy({model.predictionBatchSize: 8}), frame)
    assert found.peak_bytes < 50 * MIB
    assert given == again == sorted((row["ids"], float(row["ids"])) for row in frame.collect())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_above_two_gib_passes_through_everything_and_the_driver_never_copies_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    module = Words(2_362 * MIB)
    frame = frame_of(spark, module)
    estimator = TorchEstimator(
        model=module,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        loss=nn.L1Loss(),
        metrics={"error": nn.L1Loss()},
        featuresCol="ids",
        batchSize=32,
        store=str(tmp_path / "store"),
        checkpointDir=str(tmp_path / "checkpoints"),
        keepCheckpoints=1,
        maxRestarts=1,
        tracking="off",
        showProgress=False,
    )
    expected = sorted((row["ids"], float(row["ids"])) for row in frame.collect())
    peaks = {}

    def watched(name, function):
        with memory_watched() as found:
            result = function()
        peaks[name] = found.peak_bytes // MIB
        return result

    model = watched("fit", lambda: estimator.fit(frame))
    finished = watched("fit that is done", lambda: estimator.fit(frame))
    del finished
    assert watched("transform", lambda: predictions(model, frame)) == expected
    watched("save", lambda: model.save(str(tmp_path / "model")))
    loaded = watched("load", lambda: TorchModel.load(str(tmp_path / "model")))
    assert watched("transform of the loaded one", lambda: predictions(loaded, frame)) == expected
    watched("save of the estimator", lambda: estimator.save(str(tmp_path / "estimator")))
    watched("load of the estimator", lambda: TorchEstimator.load(str(tmp_path / "estimator")))
    watched("copy", model.copy)
    np.testing.assert_array_equal(
        model.module.embedding.weight[-5:].detach(), module.embedding.weight[-5:].detach()
    )
    # This includes libraries that are loaded meanwhile; the user's own module exists before and after.
    assert max(peaks.values()) < 256, peaks
