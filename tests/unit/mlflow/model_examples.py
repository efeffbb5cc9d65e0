"""Trained models for the tests of the flavor, and rows that they take."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import nn

from sparkdl.data import Column
from sparkdl.estimators import TorchModel
from sparkdl.estimators.summary import TrainingSummary
from sparkdl.training.history import EpochRecord
from sparkdl.training.saved_model import SavedModel
from sparkdl.training.signature import ModelOutput, ModelSignature
from tests.training.signatures import make_inputs
from tests.unit.mlflow.many_into_many import ManyIntoMany

KINDS = ("cat", "dog", "owl")


def many_into_many() -> TorchModel:
    columns = {
        "matrix": Column(name="matrix", dtype="float32", shape=(2, 3)),
        "tokens": Column(
            name="tokens", dtype="object", kind="ragged", lengths=(None,), element=("number", "int64")
        ),
        "count": Column(name="count", dtype="int32"),
    }
    inputs = make_inputs(
        *columns, dtypes=("float32", "int64", "float32"), given_by="name", padding_value=0.0, **columns
    )
    outputs = (
        ModelOutput(name="kind", kind="class", num_classes=3, classes=KINDS),
        ModelOutput(name="place", kind="value", shape=(2,)),
    )
    saved = SavedModel(ManyIntoMany().eval(), ModelSignature(inputs=inputs, outputs=outputs))
    record = EpochRecord(epoch=1, loss=0.5, rows=3, seconds=1.0, rows_per_s=3.0)
    summary = TrainingSummary(history=(record,), model_epoch=1)
    model = TorchModel(saved, summary).setFeaturesCol(list(columns))
    return model.setPredictionCol("guess")


def rows(count: int = 5) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "matrix": [rng.normal(size=(2, 3)).round(3).tolist() for _ in range(count)],
            "tokens": [rng.integers(1, 10, size=index + 1).tolist() for index in range(count)],
            "count": range(count),
        }
    )


def expected(module: nn.Module, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """What the bare module tells of rows, one at a time."""
    with torch.inference_mode():
        told = [
            module(
                matrix=torch.tensor([row.matrix]),
                tokens=torch.tensor([row.tokens]),
                count=torch.tensor([[float(row.count_)]]),
            )
            for row in frame.rename(columns={"count": "count_"}).itertuples()
        ]
    scores = torch.cat([each["kind"] for each in told])
    return {
        "kind": np.array(KINDS)[scores.argmax(dim=1).numpy()],
        "kind_probability": scores.double().softmax(dim=1).numpy(),
        "place": torch.cat([each["place"] for each in told]).numpy(),
    }
