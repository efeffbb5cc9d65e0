"""Copies of batches to a GPU that run ahead of training."""

from __future__ import annotations

import threading
from collections.abc import Generator

import numpy as np
import pytest
import torch

from sparkdl.training.device_batches import batches_for
from tests.gpu.gpu_scenes import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("ahead", [True, False])
def test_batches_arrive_on_the_gpu_in_order_and_whole(ahead: bool) -> None:
    def arrays() -> Generator[dict[str, np.ndarray], None, None]:
        for number in range(50):
            yield {"x": np.full((1000, 64), number, np.float32), "y": np.full(1000, number)}

    device = torch.device("cuda", 0)
    for number, batch in enumerate(batches_for(device, arrays(), ahead=ahead)):
        assert batch["x"].device == device
        assert (batch["x"] == number).all()
        assert (batch["y"] == number).all()
        assert batch["y"].dtype == torch.int64
    assert number == 49


def test_closing_batches_early_ends_the_copy_thread_and_closes_its_source() -> None:
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


def test_batches_without_read_ahead_are_made_on_the_training_thread_on_demand() -> None:
    made: list[str] = []

    def arrays() -> Generator[dict[str, np.ndarray], None, None]:
        for _ in range(3):
            made.append(threading.current_thread().name)
            yield {"x": np.zeros(1, np.float32)}

    device = torch.device("cuda", 0)
    for number, _ in enumerate(batches_for(device, arrays(), ahead=False), start=1):
        assert made == [threading.current_thread().name] * number


def test_a_batch_without_rows_arrives() -> None:
    (batch,) = batches_for(
        torch.device("cuda", 0), (arrays for arrays in [{"rows": np.empty(0, np.float32)}])
    )
    assert batch["rows"].shape == (0,)
