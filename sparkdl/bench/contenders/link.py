"""The training steps that ``sparkdl bench link`` times, of a decoder whose ranks have a slow link between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from sparkdl.bench.contenders.parallel import DecoderSize, make_decoder
from sparkdl.bench.contenders.sessions import Trial
from sparkdl.collective import Communicator
from sparkdl.slow_links import COMPRESSIONS, SYNCHRONIZATIONS, settings_of

MODELS = {"25M": DecoderSize(width=512, num_layers=6, num_heads=8, vocabulary=6144)}
"""Models by their number of parameters."""


class LinkTrial(Trial):
    """Rounds of training steps of one contender: forward, backward and AdamW, each rank on rows of its own.

    A round ends after a number of steps, which of a contender with local steps is the number between two
    synchronizations. The first round does not count. So the time of a round includes one synchronization, or waits for
    one that has overlapped with it.
    """

    num_warm_ups = 0

    def __init__(self, communicator: Communicator, case: Mapping[str, Any]) -> None:
        import torch

        from sparkdl.torch import DataParallel, LocalUpdates

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._module = make_decoder(MODELS[case["model"]])
        self._called: torch.nn.Module = self._module
        self._local: LocalUpdates | None = None
        if case["way"] == "local":
            settings = settings_of(case["settings"], SYNCHRONIZATIONS)
            self._local = LocalUpdates(self._module, settings, communicator)
        elif case["way"] == "gradients":
            settings = settings_of(case["settings"], COMPRESSIONS) if case["settings"] else None
            self._called = DataParallel(self._module, communicator, compression=settings)
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-4, fused=True)
        self._generator = torch.Generator().manual_seed(communicator.rank)
        self._shape = (case["rows"], case["positions"] + 1)
        self._vocabulary = MODELS[case["model"]].vocabulary
        self._steps_per_round: int = case["steps"]
        self._round_s: list[float] = []

    def run(self, operations: int) -> None:
        """Run this number of rounds, after one that does not count, and wait until all is sent."""
        import torch
        from torch.nn.functional import cross_entropy

        ends = []
        for _ in range(operations + 1):
            for _ in range(self._steps_per_round):
                tokens = torch.randint(self._vocabulary, self._shape, generator=self._generator)
                loss = cross_entropy(self._called(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                if self._local is not None:
                    self._local.after_step()
            ends.append(time.perf_counter())
        self._round_s = [end - begin for begin, end in pairwise(ends)]
        if self._local is not None:
            self._local.synchronize()

    def result(self) -> dict[str, Any]:
        """Return the seconds per step of each round, and the sum of the parameters, which is the same on all ranks."""
        sums = (float(parameter.detach().double().sum()) for parameter in self._module.parameters())
        return {
            "step_s": [seconds / self._steps_per_round for seconds in self._round_s],
            "checksum": sum(sums),
        }
