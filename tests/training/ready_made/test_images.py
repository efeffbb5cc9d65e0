"""ImageClassifier on scikit-learn's digits as images, on two ranks, against the same network trained in plain PyTorch.

Noise: the plain trainings differ in initial weights and in the order of rows. The standard deviation of their accuracy
on the test rows is 0.005; the tolerance between a fit and their mean is about three times that.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from sparkdl.estimators import ImageClassifier
from sparkdl.networks.images import ResidualNetwork
from tests.run_ranks import run_ranks
from tests.training.scenes.prepared_fits import predictions_of_trained, prepare
from tests.training.scenes.training_scenes import train_all

NUM_RANKS = 2
EPOCHS = 10
NUM_PLAIN = 4


def split():
    features, labels = load_digits(return_X_y=True)
    images = (features.reshape(-1, 8, 8) * 15).astype(np.uint8)
    return train_test_split(images, labels, test_size=0.25, random_state=0)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def accuracy_on_ranks(folder):
    images, tested, labels, expected = split()
    estimator = ImageClassifier(numWorkers=NUM_RANKS, epochs=EPOCHS)
    fit = prepare(estimator, folder, features=[png(image) for image in images], label=labels)
    rows = np.array([png(image) for image in tested], dtype=object)
    return (predictions_of_trained(fit, rows) == expected).mean()


def accuracy_in_plain_torch(seed):
    """Train the same network with the same optimizer, batches and epochs in plain PyTorch; return the accuracy."""
    images, tested, labels, expected = split()
    mean, deviation = images.mean(), images.std()

    def as_inputs(pixels):
        return torch.from_numpy((pixels[:, None] - mean) / deviation).float().expand(-1, 3, -1, -1)

    x, y = as_inputs(images), torch.from_numpy(labels)
    torch.manual_seed(seed)
    model = ResidualNetwork(
        num_channels=3,
        size=(8, 8),
        stage_widths=[32, 64, 128],
        blocks_per_stage=2,
        dropout=0.1,
        num_outputs=10,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(64 * NUM_RANKS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model.eval()(as_inputs(tested)).argmax(dim=1).numpy() == expected).mean()


@pytest.mark.slow
def test_a_ready_made_image_network_is_as_good_as_the_same_one_in_plain_torch(tmp_path, one_thread):
    accuracy = accuracy_on_ranks(tmp_path / "rows")
    plain = [accuracy_in_plain_torch(seed) for seed in range(NUM_PLAIN)]
    print(f"{accuracy:.4f}, plain torch {np.mean(plain):.4f} +- {np.std(plain, ddof=1):.4f}")
    assert accuracy > 0.95
    assert abs(accuracy - np.mean(plain)) <= 0.015


@pytest.mark.parametrize(
    "backbone",
    [
        "timm:test_resnet",
        # In training it also returns the scores of two further layers, which then get no gradient.
        pytest.param("torchvision:googlenet", marks=pytest.mark.slow),
    ],
)
def test_a_network_of_a_library_is_trained_on_ranks(tmp_path, one_thread, backbone):
    pytest.importorskip("timm", reason="timm, which comes with torchvision, is not installed")
    features, labels = load_digits(n_class=2, return_X_y=True)
    images = (features[:64].reshape(-1, 8, 8) * 15).astype(np.uint8)
    estimator = ImageClassifier(numWorkers=NUM_RANKS, epochs=3, batchSize=8, imageSize=32, backbone=backbone)
    spec, dataset, _ = prepare(
        estimator,
        tmp_path / "rows",
        rows_per_group=16,
        features=[png(image) for image in images],
        label=labels[:64],
    )
    ((outcome,), _) = run_ranks(NUM_RANKS, train_all, [(spec, dataset)])
    losses = [epoch.loss for epoch in outcome.history]
    assert losses[0] > losses[1] > losses[2]
