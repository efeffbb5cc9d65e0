"""What ``sparkdl bench feed`` times: one pass over the files, or training the demo's network on them.

Runs in the process of the contender.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.bench.feed_contenders import CONTENDERS, NUM_THREADS

if TYPE_CHECKING:
    import torch

    from sparkdl.bench.sessions import Session

_TOLERANCE = 1e-5

# Of this process, which has turns at one case alone.
_start_bytes: dict[str, int] = {}
_verified: set[tuple[str, str]] = set()


class FeedTrial:
    """Passes of one contender over the files of one case.

    Args:
        contender: a key of :data:`sparkdl.bench.feed_contenders.CONTENDERS`.
        case: the files, ``shuffle_rows``, and whether each batch is trained on: ``trains``.
    """

    def __init__(self, contender: str, case: Mapping[str, Any]) -> None:
        import pyarrow as pa
        import torch

        torch.set_num_threads(NUM_THREADS)
        pa.set_cpu_count(NUM_THREADS)
        _import_readers()
        self._case = case
        self._train = _make_training() if case["trains"] else None
        self._start_bytes = _start_bytes.setdefault(contender, _memory("VmRSS"))  # before anything is read
        _reset_peak()
        self._read = CONTENDERS[contender](case)
        self._reading = (contender, str(case["folder"]))
        # A pass that does not count, once in a process: what is read is added up, and all is loaded.
        self._is_first = self._reading not in _verified
        self.num_warm_ups = 1 if self._is_first else 0
        self._num_rows = 0
        self._waited_s: list[float] = []
        self._sum: float | None = None

    def prepare(self, repetition: int, operations: int) -> None:
        """Nothing is written between passes: reading changes no file, and all read from the system's file cache."""

    def run(self, operations: int) -> None:
        """So many passes; the first one adds up what it reads, and does not count."""
        self._num_rows, waited_s = 0, 0.0
        for _ in range(operations):
            started = time.perf_counter()
            for batch in self._read():
                waited_s += time.perf_counter() - started
                self._num_rows += len(batch[0])
                if self._is_first:
                    self._sum = (self._sum or 0.0) + float(batch[0].double().sum())
                if self._train is not None:
                    self._train(batch[0], batch[1])
                started = time.perf_counter()
        self._waited_s.append(waited_s / operations)

    def check(self) -> None:
        """Raise an ``AssertionError`` unless every row was read once."""
        expected = self._case["num_rows"]
        assert self._num_rows % expected == 0, f"{self._num_rows} rows were read of {expected}"
        if self._is_first:
            total = self._case["sum"]
            assert self._sum is not None, "the first pass adds up what it reads"
            assert abs(self._sum - total) <= _TOLERANCE * total, (
                f"what was read adds up to {self._sum}, not {total}"
            )
            self._is_first = False
            _verified.add(self._reading)

    def result(self) -> dict[str, Any]:
        """Memory at the peak above what the process took before it read, and the seconds spent waiting for batches."""
        return {
            "peak_bytes": max(0, _memory("VmHWM") - self._start_bytes),
            "waited_s": self._waited_s[self.num_warm_ups :],
        }


def feed_trial(session: Session, contender: str, case: Mapping[str, Any]) -> FeedTrial:  # noqa: ARG001  # as all trials are made
    """The trial of a turn."""
    return FeedTrial(contender, case)


def _import_readers() -> None:
    """Load what any contender needs, in every process alike: libraries are not what reading takes of memory."""
    import_module("sparkdl.training.feed_dataset")
    for name in ("sparkdl.data.petastorm.reader", "petastorm.pytorch"):
        with suppress(ModuleNotFoundError):
            import_module(name)


def _make_training() -> Any:
    import torch

    from sparkdl.cli.demo import digits_cnn

    torch.manual_seed(0)
    model = digits_cnn()
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train(x: torch.Tensor, label: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model(x), label).backward()
        optimizer.step()

    return train


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"Linux tells {name} of every process")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
