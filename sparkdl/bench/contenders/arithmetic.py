"""The arithmetic of ``sparkdl bench fit`` alone: forward, backward and optimizer, on batches in memory.

It is the yardstick, not a contender: nothing is read and no gradient is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparkdl.bench.contenders.fit_task import WIDTH, make_model, make_optimizer
from sparkdl.bench.contenders.sessions import Trial

_NUM_BATCHES = 64


class ArithmeticTrial(Trial):
    """Training steps of one rank.

    Args:
        case: settings of the case: ``steps`` per operation, and ``batch_size``.
        seed: seed of the random rows.
    """

    def __init__(self, case: Mapping[str, Any], seed: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.model = make_model()
        self._optimizer = make_optimizer(self.model.parameters())
        self._steps = case["steps"]
        generator = torch.Generator().manual_seed(seed)
        shape = (_NUM_BATCHES, case["batch_size"], WIDTH + 1)
        self._batches = list(torch.rand(shape, generator=generator))
        self._loss = torch.zeros(())

    def run(self, operations: int) -> None:
        """Run the steps of this number of operations."""
        from torch.nn.functional import mse_loss

        for step in range(operations * self._steps):
            batch = self._batches[step % _NUM_BATCHES]
            self._optimizer.zero_grad()
            outputs = self.model(batch[:, :WIDTH]).squeeze(1)
            self._loss = mse_loss(outputs, batch[:, WIDTH])
            self._loss.backward()
            self._optimizer.step()

    def check(self) -> None:
        """Raise an ``AssertionError`` if the loss is not finite."""
        assert math.isfinite(float(self._loss.detach())), "the weights are no longer numbers"
