"""Initial weights depend on their seed only, also if other threads draw weights at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from sparkdl.random_state import seeded

NUM_THREADS = 4


def draw(seed):
    with seeded(seed):
        return torch.cat([torch.rand(1) for _ in range(4000)])


def test_threads_that_draw_at_once_draw_by_their_seeds_and_leave_the_generator_as_it_was():
    expected = [draw(seed) for seed in range(NUM_THREADS)]
    before = torch.get_rng_state()
    together = threading.Barrier(NUM_THREADS)

    def draw_together(seed):
        together.wait(60)
        return draw(seed)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(draw_together, range(NUM_THREADS)))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
