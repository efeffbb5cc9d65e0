"""Records when a fit of sparkdl trains, and gives its ranks one thread, as all contenders have."""

from __future__ import annotations

import json
import time
from pathlib import Path

from sparkdl.training.callbacks import Callback, FitContext


class FitClock(Callback):
    """A callback that gives each rank one thread, and has rank 0 write the times of a fit.

    The times are when the rows were written to Parquet, when training began and when it ended.

    Args:
        path: file to write.
        store: folder of the Store, from which the rows may be gone when the fit has ended.
    """

    def __init__(self, path: str, store: str) -> None:
        self._path, self._store = path, store
        self._times: dict[str, float] = {}

    def on_fit_start(self, context: FitContext) -> None:
        """Record the time before the first batch."""
        import torch

        torch.set_num_threads(1)
        if context.rank == 0:
            self._times = {"written": newest_parquet(Path(self._store)), "training": time.time()}

    def on_fit_end(self, context: FitContext) -> None:
        """Write the times."""
        if context.rank == 0:
            Path(self._path).write_text(json.dumps({**self._times, "trained": time.time()}))


def newest_parquet(folder: Path) -> float:
    """Return when the last Parquet file below a folder was written, in seconds since 1970."""
    return max(path.stat().st_mtime for path in folder.rglob("*.parquet"))
