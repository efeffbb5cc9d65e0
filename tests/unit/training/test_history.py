from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from sparkdl.training import history
from sparkdl.training.history import EpochMeter
from sparkdl.training.metrics import EpochMetrics


def test_data_wait_share_is_the_time_until_a_batch_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(history, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def batches() -> Iterator[int]:
        for number in range(4):
            now[0] += 3.0
            yield number

    cpu = torch.device("cpu")
    meter = EpochMeter(1, cpu, SimpleNamespace(world_size=1, rank=0), EpochMetrics({}, cpu))
    seen = []
    for batch in meter.time_waits(batches()):
        seen.append(batch)
        now[0] += 1.0
    record = meter.close(learning_rate=0.1)
    assert seen == [0, 1, 2, 3]
    assert record.seconds == 16.0
    assert record.data_wait_share == 0.75
    (seconds,) = record.rank_seconds
    assert (seconds.reading, seconds.communicating, seconds.computing) == (12.0, 0.0, 4.0)
