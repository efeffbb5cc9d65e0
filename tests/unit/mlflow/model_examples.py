"""Trained models for the tests of the flavor, and rows as their inputs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import nn

from sparkdl.data import Column
from sparkdl.estimators import TorchModel
from sparkdl.estimators.summary import TrainingSummary
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.saved_model import SavedModel
from sparkdl.model.signature import ModelOutput, ModelSignature
from sparkdl.networks.tabular import CODES, NUMBERS, TabularInputs, TabularNetwork
from sparkdl.training.history import EpochRecord
from tests.training.signatures import make_inputs
from tests.unit.mlflow.many_into_many import ManyIntoMany

KINDS = ("cat", "dog", "owl")


def many_into_many() -> TorchModel:
    ragged = {"kind": "ragged", "lengths": (None,), "element": ("number", "int64")}
    columns = {
        "matrix": Column(name="matrix", dtype="float32", shape=(2, 3)),
        "tokens": Column(name="tokens", dtype="object", **ragged),
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
    record = EpochRecord(
        epoch=1,
        loss=0.5,
        rows=3,
        seconds=1.0,
        rows_per_s=3.0,
        data_wait_share=0.25,
        learning_rate=0.1,
        rank_seconds=(),
    )
    summary = TrainingSummary(history=(record,), model_epoch=1)
    model = TorchModel(saved, summary).setFeaturesCol(list(columns))
    return model.setPredictionCol("guess")


WINE = {"alcohol": 13.2, "ash": 2.4, "magnesium": 101, "region": "piedmont"}
"""A row as input of :func:`wine_classifier`."""


def wine_classifier() -> TorchModel:
    """A classifier of a table as ``TorchClassifier`` makes them, with numbers and a category, but not fitted."""
    torch.manual_seed(0)
    columns = (
        Column(name="alcohol", dtype="float64"),
        Column(name="ash", dtype="float64"),
        Column(name="magnesium", dtype="int64"),
        Column(name="region", dtype="object", kind="string"),
    )
    prepare = TabularInputs(
        numeric=("alcohol", "ash", "magnesium"), categories={"region": ("piedmont", "tuscany")}
    )
    inputs = ModelInputs(
        columns=columns,
        inputs=(ModelInput(name=NUMBERS, dtype="float32"), ModelInput(name=CODES, dtype="int64")),
        prepare=prepare,
    )
    network = TabularNetwork(
        mean=np.array([13.0, 2.4, 100.0]),
        deviation=np.array([1.0, 0.3, 15.0]),
        num_categories=(2,),
        hidden_sizes=(4,),
        dropout=0.0,
        num_outputs=3,
    )
    output = ModelOutput(name="kind", kind="class", num_classes=3)
    saved = SavedModel(network.eval(), ModelSignature(inputs=inputs, outputs=(output,)))
    return TorchModel(saved).setFeaturesCol(list(inputs.names))


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
    """The predictions of the bare module, computed row by row."""
    with torch.inference_mode():
        told = [
            module(
                matrix=torch.tensor([row.matrix]),
                tokens=torch.tensor([row.tokens]),
                count=torch.tensor([[float(row.count_)]]),
            )
            for row in frame.rename(columns={"count": "count_"}).itertuples()
        ]
    scores = torch.cat([answer["kind"] for answer in told])
    return {
        "kind": np.array(KINDS)[scores.argmax(dim=1).numpy()],
        "kind_probability": scores.double().softmax(dim=1).numpy(),
        "place": torch.cat([answer["place"] for answer in told]).numpy(),
    }
