"""Reads a whole dataset in its own process; prints the number of rows read and the peak of the memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sparkdl.data.feed.epoch_reader  # noqa: F401 - loaded before memory is measured
from sparkdl.data import ParquetDataset, ParquetFeed, PlannedFeed, scan_dataset


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main(folder: str, repeats: int, options: dict[str, object]) -> None:
    once = scan_dataset(folder)
    # Repeats the row groups of the files: much to read, little to write.
    dataset = ParquetDataset(url=once.url, columns=once.columns, row_groups=once.row_groups * repeats)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    rows, total = 0, 0.0
    kind = PlannedFeed if "planned_ranks" in options else ParquetFeed
    with kind(dataset, **options) as feed:
        for batch in feed.epoch(0):
            values = batch["x"]
            rows += len(values)
            total += sum(map(len, values)) if values.dtype == object else float(values[:, 0].sum())
    print(json.dumps({"rows": rows, "sum": total, "peak_bytes": memory("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
