"""Random state and seeds of a rank: Python's, NumPy's and torch's generators, of the CPU and of its GPU.

The seeds are reproducible and differ on each rank.
"""

from __future__ import annotations

import os
import random
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
    """Restore the states of the generators; that of a GPU stays where the state was taken without one."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    algorithm, words, position, has_gauss, numpy_gauss = state["numpy"]
    np.random.set_state((algorithm, np.array(words, dtype=np.uint32), position, has_gauss, numpy_gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state.get("cuda") is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def random_numbers_apart(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Have the generators stand after this block where they stood before it.

    Args:
        device: whose generators they are, beside those of Python, NumPy and torch on the CPU.
        seed: from which those three begin in the block; None to continue from their states.
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


def rank_seed(seed: int, rank: int, *position: int) -> int:
    """Return a 63-bit seed that depends on all numbers, with neighbouring seeds and ranks far apart."""
    words = np.random.SeedSequence([seed & 0xFFFF_FFFF_FFFF_FFFF, rank, *position]).generate_state(
        1, np.uint64
    )
    return int(words[0] >> np.uint64(1))


def seed_rank(seed: int, rank: int, *position: int) -> None:
    """Seed Python, NumPy and torch, on all devices, of this process. Runs on a *rank*.

    Args:
        seed: of the fit.
        rank: number of the rank.
        position: epoch and step, where a fit is resumed and its random numbers cannot be.
    """
    seed_generators(rank_seed(seed, rank, *position))
    # cuDNN may otherwise choose kernels that add in an order of their own.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch, on all devices, of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.manual_seed(seed)


def refuse_what_varies(refused: bool) -> None:
    """Have torch raise for an operation whose results differ from run to run, or allow them. Runs on a *rank*."""
    if refused:
        # Read when cuBLAS is first used: with more workspaces it adds in whichever order comes first.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(refused)
