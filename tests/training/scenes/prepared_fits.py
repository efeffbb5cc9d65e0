"""Fits of estimators on files, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from sparkdl.data import scan_dataset
from sparkdl.estimators.fit.inputs import prepare_fit
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel
from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import train_all

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from sparkdl.data import ParquetDataset
    from sparkdl.model.signature import ModelSignature
    from sparkdl.training.spec import TrainingSpec


def prepare(
    estimator: Any, folder: Path, *, rows_per_group: int = 100, **columns: Any
) -> tuple[TrainingSpec, ParquetDataset, ModelSignature]:
    """Prepare a fit of an estimator on columns that are written to a new folder."""
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=rows_per_group)
    params = estimator._params_of_fit()
    dataset = scan_dataset(str(folder)).with_nulls(estimator._nulls())
    inputs = prepare_fit(params, dataset, estimator._learn(params, dataset, None))
    return inputs.spec, dataset, inputs.signature


def predictions_of_trained(
    fit: tuple[TrainingSpec, ParquetDataset, ModelSignature], features: np.ndarray
) -> np.ndarray:
    """Train on two ranks; return the labels that the model predicts in this process."""
    spec, dataset, signature = fit
    ((outcome,), _) = run_ranks(2, train_all, [(spec, dataset)])
    spec.model.load_state_dict({name: torch.from_numpy(value) for name, value in outcome.weights.items()})
    return Predictor(SavedModel(spec.model, signature)).predict({"features": features})["label"]
