"""Data and estimators for the tests of estimators."""

from __future__ import annotations

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


class LossThatKillsRankOne(nn.Module):
    """A loss that writes the pid of each rank to a folder, and kills rank 1 by SIGKILL in the 20th step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.calls = str(folder), 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if dist.is_initialized():
            Path(self.folder, f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
            if self.calls == 20 and dist.get_rank() == 1:
                Path(self.folder, "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, labels)


class LossThatKillsRankOneOnce(nn.Module):
    """A loss that kills rank 1 by SIGKILL in one of its calls, but only the first time.

    With ``executor_of``, the URL of a driver, it kills an executor of that driver instead.
    """

    def __init__(self, folder: Path, *, call: int = 10, executor_of: str | None = None) -> None:
        super().__init__()
        self.folder, self.call, self.calls, self.driver = str(folder), call, 0, executor_of

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        marker = Path(self.folder, "killed")
        if self.calls == self.call and dist.is_initialized() and dist.get_rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(_executor(self.driver) if self.driver else os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, labels)


class LossThatHangsRankOneOnce(nn.Module):
    """A loss that hangs on rank 1 in one of its calls, but only the first time."""

    def __init__(self, folder: Path, *, call: int = 10) -> None:
        super().__init__()
        self.folder, self.call, self.calls = str(folder), call, 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        marker = Path(self.folder, "hung")
        if self.calls == self.call and dist.is_initialized() and dist.get_rank() == 1 and not marker.exists():
            marker.touch()
            threading.Event().wait()
        return nn.functional.cross_entropy(outputs, labels)


def _executor(driver: str) -> int:
    """Process id of an executor of this driver on this machine."""
    for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            arguments = Path("/proc", pid, "cmdline").read_text().split("\0")
            if arguments[0].endswith("java") and driver in arguments:
                return int(pid)
    raise AssertionError(f"{driver} has no executor here")


class LossThatSpoils(nn.Module):
    """A loss that overwrites or removes files that match a pattern in the 5th step of rank 0, and then may fail."""

    def __init__(self, folder: Path, pattern: str, *, removes: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.folder, self.pattern, self.removes, self.fails = str(folder), pattern, removes, fails
        self.calls = 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if dist.is_initialized() and self.calls == 5 and dist.get_rank() == 0:
            for path in Path(self.folder).glob(self.pattern):
                if self.removes:
                    path.unlink()
                else:
                    path.write_bytes(b"spoiled" * 20_000)
            if self.fails:
                raise ValueError("the loss failed")
        return nn.functional.cross_entropy(outputs, labels)


def store_is_empty(folder: Path) -> bool:
    """Whether a fit has left no files in its Store."""
    return not (folder / "store").exists() or list((folder / "store").iterdir()) == []
