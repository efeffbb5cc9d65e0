"""The copies to a GPU that run ahead of training."""

from __future__ import annotations

import threading
from collections.abc import Generator

import numpy as np
import pytest
import torch

from sparkdl.training.device_batches import batches_for
from tests.gpu.gpu_scenes import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def test_batches_arrive_on_the_gpu_in_order_and_whole() -> None:
    def arrays() -> Generator[dict[str, np.ndarray], None, None]:
        for number in range(50):
            yield {"x": np.full((1000, 64), number, np.float32), "y": np.full(1000, number)}

    device = torch.device("cuda", 0)
    for number, batch in enumerate(batches_for(device, arrays())):
        assert batch["x"].device == device
        assert (batch["x"] == number).all()
        assert (batch["y"] == number).all()
        assert batch["y"].dtype == torch.int64
    assert number == 49


def test_closing_batches_early_ends_the_thread_that_copies_and_what_it_copies_from() -> None:
    closed = threading.Event()

    def arrays() -> Generator[dict[str, np.ndarray], None, None]:
        try:
            while True:
                yield {"x": np.zeros(1000, np.float32)}
        finally:
            closed.set()

    batches = batches_for(torch.device("cuda", 0), arrays())
    next(batches)
    batches.close()
    assert closed.is_set()
    assert not any(thread.name == "sparkdl-device-copies" for thread in threading.enumerate())
