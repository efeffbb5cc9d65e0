from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkdl.data import ParquetFeed
from sparkdl.errors import TrainingError
from sparkdl.training.history import EpochMeter, ProgressReporter
from sparkdl.training.objective import Place
from sparkdl.training.trainer import _run_epoch
from sparkdl.training.update import UpdatePlan


class _FailingStep:
    objective = SimpleNamespace(prepare_all=lambda batches, first: batches, draws=False)
    device = torch.device("cpu")

    def run(self, batch: dict[str, Any], **numbers: Any) -> None:
        raise ValueError(f"failed in step {numbers['step']} with {len(batch['y'])} rows")


class _RecordingFeed(ParquetFeed):
    ended = False

    def epoch(self, epoch: int) -> Generator[dict[str, np.ndarray], None, None]:
        try:
            yield from super().epoch(epoch)
        finally:
            self.ended = True


def test_a_failing_step_ends_the_epoch_and_its_threads_while_its_traceback_is_held(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": np.arange(2000)}), tmp_path / "a.parquet", row_group_size=10)
    with _RecordingFeed(tmp_path, batch_size=4, shuffle_buffer_rows=50) as feed:
        progress = ProgressReporter(lambda event: None, epochs=1, steps_per_epoch=feed.steps_per_epoch)
        plan = UpdatePlan(feed, 1)
        meter = EpochMeter(1, torch.device("cpu"), SimpleNamespace(world_size=1, rank=0))
        with pytest.raises(TrainingError, match="ValueError: failed in step 1 with 4 rows") as raised:
            _run_epoch(
                *(Place(0, 1, 1), feed, _FailingStep(), plan, meter, progress, None, None, None),
                lambda place: None,
            )
        assert "In epoch 1, step 1 on rank 0 training failed" in str(raised.value)
        assert raised.value.__cause__.__traceback__ is not None
        assert feed.ended
        assert not any(thread.name == "sparkdl-shuffler" for thread in threading.enumerate())
