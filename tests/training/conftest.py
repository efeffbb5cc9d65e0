"""Fixtures of the trainings that tests run in their own process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # such small layers only wait for torch's threads


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: such small layers only wait for its threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
