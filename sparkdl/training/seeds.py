"""Seeds of one rank: every source of random numbers, reproducible and different on each rank."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def rank_seed(seed: int, rank: int, *place: int) -> int:
    """Return a 63-bit seed that depends on all numbers, with neighbouring seeds and ranks far apart."""
    words = np.random.SeedSequence([seed & 0xFFFF_FFFF_FFFF_FFFF, rank, *place]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def seed_rank(seed: int, rank: int, *place: int) -> None:
    """Seed Python, NumPy and torch, on all devices, of this process. Runs on a *rank*.

    Args:
        seed: of the fit.
        rank: number of the rank.
        place: epoch and step, where a fit goes on and its random numbers cannot.
    """
    derived = rank_seed(seed, rank, *place)
    random.seed(derived)
    np.random.seed(derived & 0xFFFF_FFFF)
    torch.manual_seed(derived)
    # cuDNN may otherwise choose kernels that add in an order of their own.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def refuse_what_varies(refused: bool) -> None:
    """Have torch raise for an operation whose results differ from run to run, or allow them. Runs on a *rank*."""
    if refused:
        # Read when cuBLAS is first used: with more workspaces it adds in whichever order comes first.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(refused)
