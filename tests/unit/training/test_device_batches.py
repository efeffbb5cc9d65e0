"""How far copies to a GPU run ahead; ``tests/gpu`` has the tests that need a GPU."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest
import torch

from sparkdl.training.device_batches import Copy, copy_ahead


@pytest.mark.parametrize(("rows", "most"), [(256, 4), (1024, 1), (5000, 1), (1, 9)])
def test_batches_are_copied_ahead_up_to_the_byte_limit_and_at_least_one(rows: int, most: int) -> None:
    made, begun = 0, threading.Semaphore(0)

    def copies() -> Generator[Copy, None, None]:
        nonlocal made
        while True:
            made += 1
            begun.release()
            yield {"x": torch.zeros(rows, 3), "y": torch.zeros(rows)}, None

    ahead = copy_ahead(copies(), max_bytes=16 * 1024)
    for _ in range(most):
        assert begun.acquire(timeout=60)
    ahead.close()
    assert made == most
