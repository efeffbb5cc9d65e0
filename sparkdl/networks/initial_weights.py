"""First weights that depend on a seed alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.RLock()
"""Fits of one search may begin in several threads, which have torch's generator in common."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Have torch draw the random numbers of a seed on CPU, and restore the state of the generator afterwards.

    One thread at a time is inside.
    """
    with _lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
