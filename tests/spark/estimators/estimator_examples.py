"""Data and estimators for the tests of estimators."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from sparkdl.estimators import TorchEstimator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NUM_ROWS = 203


def make_frame(spark: SparkSession, num_rows: int = NUM_ROWS) -> DataFrame:
    """Rows with four features and one of three classes that depends on them, in three partitions."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(num_rows, 4))
    classes = (features.sum(axis=1) > 0).astype(int) + (features[:, 0] > 1)
    rows = [
        (index, [float(value) for value in row], int(label), float(row[0] - row[1]), f"row {index}")
        for index, (row, label) in enumerate(zip(features, classes, strict=True))
    ]
    return spark.createDataFrame(
        rows, "id long, image array<double>, digit int, target double, text string"
    ).repartition(3, "id")


def make_model(outputs: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def make_estimator(folder: Path, **changes: Any) -> TorchEstimator:
    """An estimator that uses the store ``folder/store`` and is not tracked."""
    params: dict[str, Any] = {
        "model": make_model(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        "loss": nn.CrossEntropyLoss(),
    }
    return TorchEstimator(**{**_common(folder), **params, **changes})


def make_ready_made(made: type, **params: Any) -> Callable[..., Any]:
    """Make a function that makes a ready-made estimator like :func:`make_estimator` makes a TorchEstimator."""
    return lambda folder, **changes: made(**{**_common(folder), "learningRate": 0.01, **params, **changes})


def _common(folder: Path) -> dict[str, Any]:
    return {
        "featuresCol": "image",
        "labelCol": "digit",
        "batchSize": 16,
        "epochs": 8,
        "numWorkers": 2,
        "seed": 7,
        "store": str(folder / "store"),
        "keepRowsSeconds": 0,
        "tracking": "off",
        "showProgress": False,
    }


class _Disturbed(nn.Module):
    """Cross-entropy that does something in its calls on ranks."""

    def __init__(self, folder: Path, *, call: int) -> None:
        super().__init__()
        self.folder, self.call, self.calls = str(folder), call, 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if dist.is_initialized():
            self.on_rank(dist.get_rank())
        return nn.functional.cross_entropy(outputs, labels)

    def on_rank(self, rank: int) -> None:
        raise NotImplementedError

    def is_first_time(self, rank: int, marker: str) -> bool:
        """Whether this is the chosen call on rank 1, for the first time: then makes the file ``marker``."""
        path = Path(self.folder, marker)
        if self.calls != self.call or rank != 1 or path.exists():
            return False
        path.touch()
        return True


class LossThatKillsRankOneOnce(_Disturbed):
    """A loss that kills rank 1 by SIGKILL in one of its calls, but only the first time; writes the pid of each rank.

    With ``executor_of``, the URL of a driver, it kills an executor of that driver instead.
    """

    def __init__(self, folder: Path, *, call: int = 10, executor_of: str | None = None) -> None:
        super().__init__(folder, call=call)
        self.driver = executor_of

    def on_rank(self, rank: int) -> None:
        Path(self.folder, f"{rank}.pid").write_text(str(os.getpid()))
        if self.is_first_time(rank, "killed"):
            os.kill(process_of_executor(self.driver) if self.driver else os.getpid(), signal.SIGKILL)


class LossThatHangsRankOneOnce(_Disturbed):
    """A loss that hangs on rank 1 in one of its calls, but only the first time."""

    def __init__(self, folder: Path, *, call: int = 10) -> None:
        super().__init__(folder, call=call)

    def on_rank(self, rank: int) -> None:
        if self.is_first_time(rank, "hung"):
            threading.Event().wait()


class LossThatSpoils(_Disturbed):
    """A loss that overwrites files that match a pattern in its 5th call, on rank 0, and then may fail."""

    def __init__(self, folder: Path, pattern: str, *, fails: bool = False) -> None:
        super().__init__(folder, call=5)
        self.pattern, self.fails = pattern, fails

    def on_rank(self, rank: int) -> None:
        if rank == 0 and self.calls == self.call:
            for path in Path(self.folder).glob(self.pattern):
                path.write_bytes(b"spoiled" * 20_000)
            if self.fails:
                raise ValueError("the loss failed")


def process_of_executor(driver: str) -> int:
    """Process id of an executor of this driver on this machine."""
    for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            arguments = Path("/proc", pid, "cmdline").read_text().split("\0")
            if arguments[0].endswith("java") and driver in arguments:
                return int(pid)
    raise AssertionError(f"{driver} has no executor here")


def store_is_empty(folder: Path) -> bool:
    """Whether a fit has left no files in its Store."""
    return not (folder / "store").exists() or list((folder / "store").iterdir()) == []


def step_that_tells(folder: Path) -> Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]:
    """A trainStep that writes what each call finds to a file: its place, its threads, whether it trains, its rows."""

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found = {
            "place": [os.environ.get(name) for name in names],
            "is_on_driver": "MASTER_ADDR" not in os.environ,
            "num_threads": torch.get_num_threads(),
            "trains": model.training,
            "rows": batch["id"].tolist(),
        }
        with (folder / f"{os.getpid()}.json").open("a") as file:
            print(json.dumps(found), file=file)
        return nn.functional.cross_entropy(model(batch["image"]), batch["digit"])

    return step
