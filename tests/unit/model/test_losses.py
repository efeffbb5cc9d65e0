"""The weighted mean of a loss over a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.model.losses import compute_loss

CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), nn.CrossEntropyLoss(ignore_index=1)],
)
@pytest.mark.parametrize("shape", [(8,), (8, 5), (8, 2, 3)])
def test_row_weights_of_one_change_nothing_and_of_two_repeat_a_row(loss, shape):
    torch.manual_seed(0)
    outputs, labels = torch.randn(shape[0], 3, *shape[1:]), torch.randint(0, 3, shape)
    if len(shape) > 1:
        labels[::2, 1:] = loss.ignore_index  # what pads shorter rows
    for weights in (torch.ones(8), torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 2.0, 1.0, 1.0])):
        rows = torch.arange(8).repeat_interleave(weights.long())
        found, expected = (
            compute_loss(loss, outputs, labels, weights),
            compute_loss(loss, outputs[rows], labels[rows]),
        )
        torch.testing.assert_close(found.mean, expected.mean)
        assert found.weight == pytest.approx(expected.weight)
        torch.testing.assert_close(found.mean, loss(outputs[rows], labels[rows]))
