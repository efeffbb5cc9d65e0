"""Notes when a fit of sparkdl trains, and has its ranks compute as all contenders' do. Runs on the *ranks*."""

from __future__ import annotations

import json
from pathlib import Path

from sparkdl.bench.contenders.fit_job import now
from sparkdl.training.callbacks import Callback, FitContext


class FitClock(Callback):
    """A callback that gives each rank one thread; rank 0 writes when rows lay in Parquet and training began and ended.

    Args:
        path: of the file.
        store: folder of the Store, from which the rows may be gone when the fit has ended.
    """

    def __init__(self, path: str, store: str) -> None:
        self._path, self._store = path, store
        self._times: dict[str, float] = {}

    def on_fit_start(self, context: FitContext) -> None:
        """Note the time before the first batch."""
        import torch

        torch.set_num_threads(1)
        if context.rank == 0:
            self._times = {"written": newest_parquet(Path(self._store)), "training": now()}

    def on_fit_end(self, context: FitContext) -> None:
        """Write the times."""
        if context.rank == 0:
            Path(self._path).write_text(json.dumps({**self._times, "trained": now()}))


def newest_parquet(folder: Path) -> float:
    """When the last Parquet file below a folder was written."""
    return max(path.stat().st_mtime for path in folder.rglob("*.parquet"))
