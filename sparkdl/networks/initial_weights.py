"""Initial weights that depend only on a seed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.RLock()
"""Fits of one search may begin in several threads, which share torch's generator."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which torch draws the random numbers of a seed on CPU; the generator's state is restored afterwards.

    Only one thread at a time can be in this context.
    """
    with _lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
