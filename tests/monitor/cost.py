"""Measures what a monitor costs: ``python -m tests.monitor.cost`` trains with and without one, in turn.

It prints the processor time and the elapsed time of the monitored trainings, as a share of those of the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from torch import nn

from sparkdl.monitor import Monitor
from tests.monitor.monitored_trainings import train_in_turn
from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import make_spec, write_dataset

WIDTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="from one sample to the next")
    options = parser.parse_args()
    hidden = [nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)]
    spec = make_spec(model=nn.Sequential(*hidden), epochs=options.epochs, batch_size=32)
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "rows", options.rows, rows_per_group=1000)
        of_ranks = run_ranks(
            options.ranks, train_in_turn, spec, dataset, Monitor(seconds=options.seconds), options.pairs
        )
    for rank, times in enumerate(of_ranks):
        for number, name in enumerate(("processor", "elapsed")):
            plain, monitored = ([pair[number] for pair in times[kind]] for kind in ("plain", "monitored"))
            ratios = [with_monitor / without for with_monitor, without in zip(monitored, plain, strict=True)]
            print(
                f"rank {rank}, {name} time: {statistics.median(plain):.2f} s without a monitor; with it "
                f"{sum(monitored) / sum(plain):.3f} times as long, median of pairs {statistics.median(ratios):.3f}, "
                f"fastest {min(monitored) / min(plain):.3f}"
            )


if __name__ == "__main__":
    main()
