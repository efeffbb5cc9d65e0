"""Weights pass through the driver without being copied: a copy of 100 MiB would be detected here."""

from __future__ import annotations

import filecmp
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from sparkdl.data import ParquetDataset, scan_dataset
from sparkdl.errors import ParamError, StoreError
from sparkdl.estimators import TorchEstimator
from sparkdl.estimators.fit.inputs import check_picklable, prepare_fit
from sparkdl.model.saved_model import load_module, save_module
from sparkdl.training.remote.transfer import fetch_module, load_spec, store_module, store_spec
from tests.memory_watch import memory_watched

MIB = 1 << 20
ROWS = 25 * MIB // 64
COPY_BYTES = 50 * MIB
"""Half of a copy, and more than the copies of the small parameters and their gradients."""


class Words(nn.Module):
    """An embedding, by default of 100 MiB, and a linear layer."""

    def __init__(self, num_rows: int = ROWS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_rows, 64, _weight=torch.full((num_rows, 64), 0.5))
        self.last = nn.Linear(64, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(ids.reshape(-1)))


@pytest.fixture(scope="module")
def words() -> Words:
    return Words()


def test_memory_watch_detects_a_copy(words: Words) -> None:
    with memory_watched() as found:
        words.embedding.weight.detach().clone()
    assert found.peak_bytes > 90 * MIB, "of 100"
    with memory_watched() as found:
        time.monotonic()
    assert found.peak_bytes < MIB


@pytest.fixture
def dataset(tmp_path: Path) -> ParquetDataset:
    pq.write_table(pa.table({"ids": [1, 2, 3, 4], "label": [0.0, 1.0, 0.0, 1.0]}), tmp_path / "rows.parquet")
    return scan_dataset(str(tmp_path))


def test_trial_on_the_driver_neither_copies_nor_changes_large_weights(
    words: Words, dataset: ParquetDataset
) -> None:
    estimator = TorchEstimator(
        model=words,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        loss=nn.MSELoss(),
        metrics={"mae": nn.L1Loss()},
        featuresCol="ids",
    )
    version = words.embedding.weight._version
    prepare_fit(
        estimator.copy({estimator.model: Words(num_rows=10)}), dataset
    )  # loads the required libraries
    with memory_watched() as found:
        check_picklable(estimator)
        inputs = prepare_fit(estimator, dataset)
    assert found.peak_bytes < COPY_BYTES
    assert not inputs.spec.has_unused_parameters
    assert words.embedding.weight._version == version
    assert words.embedding.weight.grad is None


def change_weights(model: Words, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        model.embedding.weight[0].add_(1)
    return model(batch["ids"]).mean()


def test_a_step_that_changes_large_weights_by_itself_is_refused(dataset: ParquetDataset) -> None:
    estimator = TorchEstimator(
        model=Words(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        trainStep=change_weights,
        featuresCol="ids",
    )
    with pytest.raises(ParamError, match="trainStep changed weights"):
        prepare_fit(estimator, dataset)


def test_weights_go_to_the_ranks_and_back_through_the_store_without_a_copy_on_the_driver(
    words: Words, dataset: ParquetDataset, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    estimator = TorchEstimator(
        model=words,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=nn.MSELoss(),
        featuresCol="ids",
    )
    spec = prepare_fit(estimator, dataset).spec
    with memory_watched() as found:
        stored = store_spec(spec, str(folder))
    assert found.peak_bytes < COPY_BYTES
    assert len(stored.structure) < MIB
    trained = load_spec(stored).model  # the rank itself holds the weights once
    with torch.no_grad():
        trained.embedding.weight.add_(1)
    with memory_watched() as found:
        outcome = store_module(trained, str(folder))
        fetched = fetch_module(outcome, str(folder))
        shutil.rmtree(folder)  # as the Store does at the end of a fit
        ids = torch.tensor([0, 5, ROWS - 1])
        torch.testing.assert_close(fetched(ids), trained(ids))
    assert found.peak_bytes < COPY_BYTES
    assert words.embedding.weight.unique().tolist() == [0.5]


def test_a_module_is_saved_and_loaded_without_a_copy(words: Words, tmp_path: Path) -> None:
    with memory_watched() as found:
        save_module(words, tmp_path / "module")
        loaded, _ = load_module(tmp_path / "module")
        again, _ = load_module(tmp_path / "module")
        ids = torch.tensor([0, 5, ROWS - 1])
        torch.testing.assert_close(loaded(ids), words(ids))
        save_module(again, tmp_path / "again")
    assert found.peak_bytes < COPY_BYTES
    name = "weights.safetensors"
    assert filecmp.cmp(tmp_path / "module" / name, tmp_path / "again" / name, shallow=False)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damaged_or_missing_trained_weights_are_refused(tmp_path: Path, damage: str) -> None:
    stored = store_module(nn.Linear(3, 2), str(tmp_path))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-4] if damage == "cut" else content[:-4] + b"\1\2\3\4")
    words = "cannot be read from" if damage == "gone" else "are not what a rank wrote: .* see alike"
    with pytest.raises(StoreError, match=words):
        fetch_module(stored, str(tmp_path))
