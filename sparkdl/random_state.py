"""Random state and seeds of a rank: the generators of Python, NumPy and torch, on the CPU and on the rank's GPU.

The seeds are reproducible and differ on each rank.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator from which training may draw. Runs on a *rank*."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (algorithm, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        **({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of the generators; the GPU's is unchanged if ``state`` was taken without a GPU."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    algorithm, words, position, has_gauss, numpy_gauss = state["numpy"]
    np.random.set_state((algorithm, np.array(words, dtype=np.uint32), position, has_gauss, numpy_gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state.get("cuda") is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def random_numbers_apart(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restore the states of the generators at the end of the ``with`` block.

    Args:
        device: device whose generator is restored, in addition to those of Python, NumPy and torch on the CPU.
        seed: seed of those three generators inside the block; None to continue from their current states.
    """
    before = random_state(device)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed & 0xFFFF_FFFF)
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        set_random_state(before, device)


_lock = threading.RLock()
"""Fits of one search may begin in several threads, which share torch's generator."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which torch draws the random numbers of a seed on CPU; only one thread at a time can be in it.

    The generators of Python and NumPy, from which other threads of the driver may draw, are left alone.
    """
    with _lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def rank_seed(seed: int, rank: int, *position: int) -> int:
    """Return a 63-bit seed that depends on all arguments; neighbouring seeds and ranks give unrelated values."""
    words = np.random.SeedSequence([seed & 0xFFFF_FFFF_FFFF_FFFF, rank, *position]).generate_state(
        1, np.uint64
    )
    return int(words[0] >> np.uint64(1))


def seed_rank(seed: int, rank: int, *position: int) -> None:
    """Seed the generators of Python, NumPy and torch on all devices of this process. Runs on a *rank*.

    Args:
        seed: seed of the fit.
        rank: number of the rank; ranks that pass the same number get the same seed.
        position: epoch and step at which a fit is resumed, if its random state cannot be restored.
    """
    seed_generators(rank_seed(seed, rank, *position))
    # Otherwise cuDNN may choose kernels whose order of additions varies.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch on all devices of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.manual_seed(seed)


def refuse_what_varies(refused: bool) -> None:
    """Set whether torch raises an error for operations whose results differ from run to run. Runs on a *rank*."""
    if refused:
        # cuBLAS reads this at its first use: with more workspaces its order of additions varies.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(refused)
