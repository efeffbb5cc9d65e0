"""Every kind of input, label and loss: two ranks train and predict like plain torch on the joined rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.data import ParquetFeed
from sparkdl.estimators import TorchEstimator
from sparkdl.estimators.fit.inputs import prepare_fit
from sparkdl.model.predictor import Predictor
from sparkdl.model.saved_model import SavedModel, load_model, save_model
from tests.run_ranks import run_ranks
from tests.training.scenes.input_scenes import CODES, KINDS, SCENES, decode, padded, tensor, write_rows
from tests.training.scenes.training_scenes import assert_same_weights, joined_epochs, train_all

TOLERANCE = 2e-6
WORLD_SIZE, BATCH_SIZE, EPOCHS = 2, 8, 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows")


def make_model(scene):
    torch.manual_seed(2)
    return scene.make()


def make_fit(scene, dataset):
    params = {
        "model": make_model(scene),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "labelCol": "number",
        "batchSize": BATCH_SIZE,
        "epochs": EPOCHS,
        "numWorkers": WORLD_SIZE,
        "seed": 4,
    }
    return prepare_fit(TorchEstimator(**{**params, **scene.params}), dataset)


@pytest.fixture(scope="module")
def fits(dataset):
    return {name: make_fit(scene, dataset) for name, scene in SCENES.items()}


@pytest.fixture(scope="module")
def trained(dataset, fits):
    outcomes = run_ranks(WORLD_SIZE, train_all, [(fit.spec, dataset) for fit in fits.values()])
    return dict(zip(SCENES, outcomes[0], strict=True))


def train_plainly(scene, dataset, spec):
    """Train by a plain loop over the joined rows of all ranks, in the order of the files."""
    model = make_model(scene)
    optimizer = spec.optimizer(model.parameters())
    for steps in joined_epochs(spec, dataset, WORLD_SIZE):
        for rows in steps:
            optimizer.zero_grad()
            scene.loss(model, rows).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", SCENES)
def test_two_ranks_equal_plain_torch_on_the_joined_rows(trained, fits, dataset, name):
    expected = train_plainly(SCENES[name], dataset, fits[name].spec)
    assert_same_weights(trained[name].weights, expected, atol=TOLERANCE)


def rows_of(dataset):
    with ParquetFeed(dataset, batch_size=dataset.num_rows, shuffle=False) as feed:
        (rows,) = feed.epoch(0)
        return rows


EXPECTED = {
    "padded tokens by name": lambda model, rows: {
        "number": model(padded(rows["tokens"]), tensor(rows["dense"])).argmax(dim=1).tolist()
    },
    "bytes and strings": lambda model, rows: {
        "target": model(
            pixels=torch.from_numpy(decode(rows)["pixels"]),
            kind=torch.from_numpy(decode(rows)["kind"]).unsqueeze(1),
        )
        .squeeze(1)
        .tolist()
    },
    "two heads by name, weighted rows": lambda model, rows: {
        "number": model(tensor(rows["dense"]))["number"].argmax(dim=1).tolist(),
        "target": model(tensor(rows["dense"]))["target"].squeeze(1).tolist(),
    },
    "string labels": lambda model, rows: {
        "kind": [KINDS[index] for index in model(tensor(rows["dense"])).argmax(dim=1)]
    },
    "boolean labels": lambda model, rows: {"flag": (model(tensor(rows["dense"])).squeeze(1) > 0).tolist()},
    "integers that do not count from 0": lambda model, rows: {
        "code": [CODES[index] for index in model(tensor(rows["dense"])).argmax(dim=1)]
    },
    "the user's own step": lambda model, rows: {"number": model(tensor(rows["dense"])).flatten().tolist()},
    "changed for training": lambda model, rows: {
        "number": model(tensor(rows["dense"])).argmax(dim=1).tolist()
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_saved_model_predicts_numbers_and_names_of_labels(fits, dataset, tmp_path, name):
    model, rows = make_model(SCENES[name]).eval(), rows_of(dataset)
    save_model(SavedModel(model, fits[name].signature), tmp_path / "model")
    with torch.no_grad():
        expected = EXPECTED[name](model, rows)
    # One batch of all rows, because arrays are padded to the longest row of their batch.
    found = Predictor(load_model(tmp_path / "model"), batch_size=64).predict(rows)
    assert found.keys() == expected.keys()
    for label, values in found.items():
        if values.dtype == np.float64:
            np.testing.assert_allclose(values.reshape(-1), expected[label], rtol=1e-6, atol=1e-6)
        else:
            assert values.tolist() == expected[label]
