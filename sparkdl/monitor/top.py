"""``sparkdl top``: shows the monitored fits and runs of this user on this machine while they run."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from sparkdl.errors import ParamError, count_of
from sparkdl.foreign_errors import needing
from sparkdl.monitor.board import RankFigures, Snapshot
from sparkdl.monitor.exports import status_files

if TYPE_CHECKING:
    from rich.console import RenderableType

_SLOW = 1.25
"""Slowness from which a rank is shown in colour."""

_WIDTH_OF_FILES = 200
"""Characters of a line where the output is not a terminal: no column is left out."""

_DESCRIPTION = """\
Shows the fits and runs of this user on this machine that have a monitor, as TorchEstimator(monitor=Monitor()) and
Runner(monitor=Monitor()) do: their progress and speed, and of each rank what it waits for and what it uses. It reads
the file that the driver keeps in a folder of the user, and ends when they have ended.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.description = _DESCRIPTION
    parser.add_argument("pid", nargs="?", type=int, help="process id of one driver (default: all)")
    parser.add_argument("--once", action="store_true", help="print the figures once, and end")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="from one look at the files to the next (default: %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    """Show the figures until the fits have ended; return 1 if none runs, else 0.

    Raises:
        ParamError: if an option cannot work, or rich is not installed.
    """
    if not 0.05 <= options.seconds <= 3600:
        raise ParamError(f"--seconds must be between 0.05 and 3600, got {options.seconds:g}.")
    with needing("sparkdl top", "monitor", "rich"):
        from rich.console import Console
        from rich.live import Live
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    snapshots = running_snapshots(options.pid)
    if not snapshots:
        which = "with a monitor" if options.pid is None else f"of process {options.pid}"
        console.print(
            f"No fit or run {which} runs on this machine. Start one with monitor=sparkdl.monitor.Monitor()."
        )
        return 1
    if options.once:
        console.print(as_tables(snapshots, console.width))
        return 0
    with Live(as_tables(snapshots, console.width), console=console, auto_refresh=False) as live:
        while latest := running_snapshots(options.pid):
            snapshots = latest
            live.update(as_tables(snapshots, console.width), refresh=True)
            time.sleep(options.seconds)
    console.print(f"{', '.join(snapshot.name for snapshot in snapshots)} ended.")
    return 0


def running_snapshots(pid: int | None = None) -> list[Snapshot]:
    """Return the latest snapshots of the monitors of this user whose drivers run; the oldest monitor comes first.

    Args:
        pid: process id of the driver; None for all.
    """
    snapshots = []
    for file in status_files(pid):
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # of another version of sparkdl
            snapshots.append(Snapshot.from_fields(json.load(file)))
    return sorted(snapshots, key=lambda snapshot: snapshot.began_at)


def as_tables(snapshots: Sequence[Snapshot], width: int) -> RenderableType:
    """Return a title and a table of ranks for each snapshot, for rich.

    Where a table is wider than ``width`` characters, columns of :data:`_LEFT_OUT_FIRST` are left out.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for snapshot in snapshots:
        parts += [Text(), *map(Text, title_of(snapshot))]
        ranks = list(snapshot.ranks.values())
        cells = {header: [cell(figures) for figures in ranks] for header, cell in _COLUMNS}
        widths = {header: max(map(len, [header, *column])) for header, column in cells.items() if any(column)}
        for header in _LEFT_OUT_FIRST:
            if len("rank") + sum(_BETWEEN + length for length in widths.values()) > width:
                widths.pop(header, None)
        table = Table("rank", *widths, box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0))
        for column in table.columns:
            column.justify = "left" if column.header == "host" else "right"
        for number, (rank, figures) in enumerate(snapshot.ranks.items()):
            is_slow = figures.slowness is not None and figures.slowness >= _SLOW
            row = [cells[header][number] for header in widths]
            table.add_row(str(rank), *row, style="yellow" if is_slow else None)
        parts.append(table if ranks else Text("The ranks have not sent a sample yet."))
    return Group(*parts)


def title_of(snapshot: Snapshot) -> list[str]:
    """Return the lines above the table of a snapshot: its progress, and the figures of all ranks together."""
    position, totals = snapshot.position, snapshot.totals()
    parts = [snapshot.name]
    for name in ("epoch", "step"):
        if name in position:
            of_all = f"/{position[f'{name}s']:.0f}" if f"{name}s" in position else ""
            parts.append(f"{name} {position[name]:.0f}{of_all}")
    if "loss" in position:
        parts.append(f"loss {position['loss']:.4f}")
    if "eta_s" in position:
        parts.append(f"ETA {_time(position['eta_s'])}")
    parts.append(f"for {_time(snapshot.at - snapshot.began_at)}")
    age_s = time.time() - snapshot.at
    parts.append(f"sample {age_s:.0f} s ago" if age_s >= 1 else "sample now")
    rates = [count_of(len(snapshot.ranks), "rank"), f"{totals.get('rows_per_s', 0):,.0f} rows/s"]
    if "tokens_per_s" in totals:
        rates.append(f"{totals['tokens_per_s']:,.0f} tokens/s")
    if "flops_per_s" in totals:
        rates.append(f"{_si(totals['flops_per_s'])}FLOP/s")
    if "utilization" in totals:
        rates.append(f"{totals['utilization']:.1%} of the peak (MFU)")
    if "efficiency" in totals:
        rates.append(f"{totals['efficiency']:.0%} of the time not blocked in communication")
    return ["  ".join(parts), "  ".join(rates)]


def _time(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))


def _si(value: float) -> str:
    """Return a number with a prefix of its unit: ``1.25 G``."""
    exponent = min(max(0, int(math.log10(value) // 3)), 6) if value >= 1 else 0
    return f"{value / 1000**exponent:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][exponent]}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _size(value: float | None) -> str:
    return "" if not value else f"{_si(value)}B"


_COLUMNS: tuple[tuple[str, Callable[[RankFigures], str]], ...] = (
    ("host", lambda figures: figures.host),
    ("rows/s", lambda figures: f"{figures.rows_per_s:,.0f}"),
    ("tokens/s", lambda figures: f"{figures.tokens_per_s:,.0f}" if figures.tokens_per_s else ""),
    ("FLOP/s", lambda figures: _si(figures.flops_per_s) if figures.flops_per_s else ""),
    ("MFU", lambda figures: _share(figures.utilization)),
    ("compute", lambda figures: _share(figures.computing)),
    ("communicate", lambda figures: _share(figures.communicating)),
    ("read", lambda figures: _share(figures.reading)),
    ("slowness", lambda figures: "" if figures.slowness is None else f"{figures.slowness:.2f}x"),
    ("bus B/s", lambda figures: _si(figures.bandwidth) if figures.bandwidth else ""),
    ("cores", lambda figures: f"{figures.processor_cores:.2f}"),
    ("memory", lambda figures: _size(figures.memory_bytes)),
    ("GPU", lambda figures: _share(figures.gpu_load)),
    ("GPU memory", lambda figures: _size(figures.gpu_memory_bytes)),
)
"""Headers and cells of the table; a column without a value is left out."""

_LEFT_OUT_FIRST = ("FLOP/s", "cores", "bus B/s", "memory", "GPU memory", "tokens/s", "GPU", "MFU")
_BETWEEN = 2
