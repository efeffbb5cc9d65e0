"""Two ranks, one with half of the speed or half of the processor, and how much of their speed they use.

``python -m tests.training.scenes.unequal_ranks`` measures both; the second as root, with control groups of version 1.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import Outcome, make_model, make_spec, train_all, write_dataset

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset
    from sparkdl.training.spec import TrainingSpec
    from tests.run_ranks import RankEnvironment


class SlowModel(nn.Module):
    """A model that takes seconds for each row, others on each rank."""

    def __init__(self, seconds_per_row: tuple[float, ...]) -> None:
        super().__init__()
        self.body, self.seconds_per_row = make_model(), seconds_per_row

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(len(rows) * self.seconds_per_row[torch.distributed.get_rank()])
        outputs: torch.Tensor = self.body(rows)
        return outputs


class BusyModel(nn.Module):
    """A model that takes the processor for some tens of milliseconds per batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(rows)
        return outputs


PROCESSORS = (0.3, 0.15)
"""Quota of each rank, in processors: so little that it gets it beside other processes."""
_PERIOD_US = 20_000
_GROUPS = Path("/sys/fs/cgroup/cpu")
"""Control groups of version 1."""


def can_limit_processors() -> bool:
    """Whether this process can give ranks a quota."""
    return os.access(_GROUPS / "cpu.cfs_quota_us", os.W_OK)


@contextmanager
def limited_processor(processors: float) -> Iterator[None]:
    """Limit this process to a part of a processor, as the kernel limits a container."""
    group = _GROUPS / f"sparkdl-rank-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(processors * _PERIOD_US)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def train_with_limited_processor(
    environment: RankEnvironment, cases: list[tuple[TrainingSpec, ParquetDataset]]
) -> list[Outcome]:
    """Train; rank 1 has half of the processor that rank 0 has."""
    with limited_processor(PROCESSORS[environment.rank]):
        return train_all(environment, cases)


def share_reached(outcome: Outcome) -> float:
    """Rows per second of the last epoch, as a share of what the ranks would have together if none waited."""
    last = outcome.history[-1]
    shares = last.rank_rows or (1,) * len(last.rank_seconds)
    possible = sum(
        last.rows * share / sum(shares) / rank.computing
        for share, rank in zip(shares, last.rank_seconds, strict=True)
    )
    return last.rows_per_s / possible


def fit_with_equal_rows_and_by_speed(folder: Path, half_of: str) -> tuple[Outcome, Outcome]:
    """Train twice on two ranks; rank 1 has half of the ``"speed"`` or of the ``"processor"``."""
    if half_of == "speed":
        model, batch_size, num_rows, run = SlowModel((0.004, 0.008)), 48, 1200, train_all
    else:
        model, batch_size, num_rows, run = BusyModel(), 4096, 120_000, train_with_limited_processor
    dataset = write_dataset(folder, num_rows, rows_per_group=num_rows // 10)
    spec = make_spec(model=model, batch_size=batch_size, epochs=4, cache="memory")
    equal, by_speed = run_ranks(2, run, [(spec, dataset), (replace(spec, balance="speed"), dataset)])[0]
    return equal, by_speed


if __name__ == "__main__":
    # The ranks find its classes by the name of the module, which is not __main__ there.
    from tests.training.scenes import unequal_ranks

    for half_of in ("speed", "processor") if can_limit_processors() else ("speed",):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = unequal_ranks.fit_with_equal_rows_and_by_speed(Path(folder), half_of)
        for balance, outcome in zip(("equal", "speed"), outcomes, strict=True):
            last = outcome.history[-1]
            print(
                f"half of the {half_of}, balance={balance!r}: {last.rows_per_s:.0f} rows/s, "
                f"{share_reached(outcome):.2f} of what is possible, rows of the ranks {last.rank_rows or 'equal'}",
                flush=True,
            )
