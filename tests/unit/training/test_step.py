"""The error about a loss that is not finite."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparkdl.errors import TrainingError
from sparkdl.training.step import FiniteLossCheck

NAN, INFINITY = math.nan, math.inf

BATCHES = {
    "rows of a scalar": (
        {"x": [[1.0], [NAN], [INFINITY]]},
        r"In its batch 'x' is NaN or infinite in 2 of 3 rows\. Fill",
    ),
    "an array, and a label": (
        {"x": [[1.0, NAN], [1.0, 1.0]], "y": [NAN, INFINITY]},
        "'x' is NaN or infinite in 1 of 2 rows and 'y' is NaN or infinite in 2 of 2 rows",
    ),
    "numbers as they should be": (
        {"x": [1.0, 2.0], "y": [1, 2]},
        "Lower the learning rate, or look for NaN and extreme",
    ),
    "strings, for a trainStep": (
        {"x": [NAN], "text": np.array(["a text"], dtype=object)},
        r"In its batch 'x' is NaN or infinite in 1 of 1 rows\. Fill",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_error_for_a_loss_that_is_not_finite_names_the_columns_at_fault(name):
    columns, message = BATCHES[name]
    batch = {
        column: values if isinstance(values, np.ndarray) else torch.tensor(values)
        for column, values in columns.items()
    }
    check = FiniteLossCheck(SimpleNamespace(rank=0, world_size=1), torch.device("cpu"))
    check.observe(torch.tensor(1.0), batch, epoch=3, step=4)
    with pytest.raises(TrainingError, match=rf"nan in epoch 3, step 4 on rank 0\..*{message}"):
        check.observe(torch.tensor(NAN), batch, epoch=3, step=4)
