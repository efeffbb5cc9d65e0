"""``sparkdl bench allreduce``: the time of an allreduce by sparkdl and by other libraries.

The allreduce of sparkdl is timed through the communicator and through torch. Runs where it is called; the ranks are
processes on this machine. Every time is the time of the slowest rank.

:func:`bytes_moved` gives the bytes of memory that each rank reads and writes in an allreduce, by the algorithm of the
contender. It counts all bytes that pass through the processor, cached or not. A plain copy of S bytes moves 2 S.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.bench.contest import MAX_OPERATIONS, Case, Measurements, hold, rows_of
from sparkdl.bench.libraries import names_of, split_missing
from sparkdl.bench.options import add_common_arguments, check_common_arguments
from sparkdl.bench.report import (
    MEASURED,
    Columns,
    Row,
    format_size,
    multiples_of,
    parse_size,
    plot_bandwidth,
    show,
)
from sparkdl.errors import ParamError

# Memory traffic of a TCP connection over loopback per byte sent: the kernel call of the sender reads and writes the
# byte, and so does the call of the receiver.
_LOOPBACK_BYTES_PER_BYTE_SENT = 4

# Adding a received byte to a local one: two bytes are read, one is written.
_BYTES_PER_BYTE_ADDED = 3

# native/src/shm/shm_group.cc: up to this size, summed over all ranks, every rank adds the whole buffers of all ranks.
# With float32 two ranks always do so.
_ONE_ROUND_BYTES = 32 * 1024


def bytes_moved(contender: str, num_bytes: int, num_tensors: int, world_size: int) -> int | None:
    """Bytes moved per rank for ``num_tensors`` tensors of ``num_bytes`` each; None if the algorithm is not known."""
    formula = _FORMULAS.get(contender)
    return None if formula is None else round(num_tensors * formula(num_bytes, world_size))


def _shared_memory(num_bytes: int, world_size: int) -> float:
    """Bytes moved by allreduce through shared memory.

    Small buffers, and those of two ranks, take one round: every rank copies its buffer in and adds all buffers. All
    others take two rounds: slices are copied in and added, then the sums are fetched.
    """
    if world_size == 2 or num_bytes * world_size <= _ONE_ROUND_BYTES:
        return num_bytes * (2 + world_size + 1)
    block_bytes = num_bytes / world_size
    others = num_bytes - block_bytes
    copied_in, copied_out = 2 * others, 2 * others
    added = world_size * block_bytes + block_bytes
    pushed = 2 * block_bytes
    return copied_in + added + pushed + copied_out


def _ring_over_loopback(num_bytes: int, world_size: int) -> float:
    """Bytes moved by Gloo: a ring reduce-scatter and a ring allgather. Each sends all blocks but one."""
    sent_per_pass = num_bytes * (world_size - 1) / world_size
    return sent_per_pass * (2 * _LOOPBACK_BYTES_PER_BYTE_SENT + _BYTES_PER_BYTE_ADDED)


# MPI and Horovod are not included: their rounding depends on the library, its version and the size.
_FORMULAS: dict[str, Callable[[int, int], float]] = {
    "copy": lambda num_bytes, _: 2 * num_bytes,
    "native": _shared_memory,
    "arena": lambda num_bytes, _: (
        2 * num_bytes
    ),  # a rank reads its slice of all buffers, and writes the sum to all
    "torch": _shared_memory,
    "gloo": _ring_over_loopback,
    "gloo tuned": _ring_over_loopback,
}


_DEFAULT_SIZES = "1KiB,16KiB,256KiB,4MiB,64MiB,128MiB"
_DEFAULT_QUEUED = "100x256KiB"

# From this size on, in bytes, a repetition is one operation. With more operations, fast contenders would reduce the
# same buffers again while the caches still hold them, and slow contenders would not.
_ALONE_BYTES = 2**20

OURS = {"native": "native", "arena": "native", "torch": "torch"}
"""Library that the ranks of each contender of sparkdl open, by contender."""

AGAINST = {
    "gloo": {"gloo": "gloo", "gloo tuned": "gloo tuned"},
    "mpi": {"mpi": "mpi"},
    "impi": {"intel mpi": "intel mpi"},
}
"""Libraries to compare with, and their contenders."""

_LEGEND = (
    "native: sparkdl's communicator; arena: the same, on buffers in memory that it shares; torch: the same, under\n"
    "torch.distributed. copy: all ranks copy such a buffer at once.\n"
    "native is 2.00x: that contender takes twice as long as native. bus GB/s: as nccl-tests defines it.\n"
    "moved: bytes that each rank reads and writes, as the contender's algorithm has it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_common_arguments(parser, "ranks", "seconds", "json", "plot", seconds=1.0)
    parser.add_argument(
        "--sizes", default=_DEFAULT_SIZES, help="buffer sizes, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--queued",
        default=_DEFAULT_QUEUED,
        metavar="NxSIZE",
        help="also time so many buffers of a size that are submitted together and then waited for; '' for none"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--buffers",
        type=int,
        default=2,
        help="how many buffers of a size take turns, all rewritten before each repetition: one stays in the caches"
        " (hot); two of 4 MiB may still lie in the last-level cache, as a gradient just computed does, more do not"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--against",
        default=",".join(AGAINST),
        help="what to compare with, besides Horovod where it is installed (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report and the plot that were asked for.

    Raises:
        ParamError: if an option has a value that cannot work.
        RankError: if a contender failed.
    """
    check_common_arguments(arguments, ranks=2, buffers=1)
    cases = make_cases(arguments.sizes, arguments.queued, arguments.buffers)
    contenders, missing = choose_contenders(arguments.against)
    measured = hold(
        "allreduce",
        world_size=arguments.ranks,
        libraries={"copy": "native"} | contenders,
        cases=cases,
        seconds=arguments.seconds,
    )
    rows = make_rows(cases, measured, arguments.ranks)
    show("allreduce", rows, COLUMNS, arguments, legend=_LEGEND, missing=missing, plot=plot_bandwidth)
    return 0


def make_cases(sizes: str, queued: str, num_buffers: int) -> list[Case]:
    """Return the cases that the options ``--sizes``, ``--queued`` and ``--buffers`` ask for.

    Raises:
        ParamError: if an option cannot be parsed.
    """
    tensors = {
        f"allreduce {format_size(size)}": (size, 1)
        for size in (parse_size(text) for text in sizes.split(","))
    }
    if queued:
        match = re.fullmatch(r"([1-9]\d*)x(.+)", queued.strip())
        if match is None:
            raise ParamError(f"--queued {queued} is not understood; write it as {_DEFAULT_QUEUED}")
        count, size = int(match[1]), parse_size(match[2])
        tensors[f"{count} allreduces of {format_size(size)}, queued"] = size, count
    return [
        Case(
            name=name,
            settings={"num_bytes": size, "num_tensors": count, "num_buffers": num_buffers},
            max_operations=1 if size * count >= _ALONE_BYTES else MAX_OPERATIONS,
        )
        for name, (size, count) in tensors.items()
    ]


def choose_contenders(against: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the contenders that can run with their libraries, and the reasons why the others cannot.

    The contenders of sparkdl come first.

    Raises:
        ParamError: if ``against`` names something unknown.
    """
    wanted = dict(OURS)
    for name in names_of(against, list(AGAINST), "--against"):
        wanted |= AGAINST[name]
    return split_missing(wanted | {"horovod": "horovod"})


def make_rows(
    cases: Sequence[Case], measured: Mapping[str, Mapping[str, Measurements]], world_size: int
) -> list[dict[str, Any]]:
    """Return one row per case and contender, including ``copy``.

    Algorithm bandwidth is ``bytes / time``. Bus bandwidth is the algorithm bandwidth times ``2 (n - 1) / n``, the part
    of the buffer that any allreduce has to move over each rank's link, as nccl-tests defines it. ``percent_of_copy``
    is the time in which all ranks at once copy a buffer of this size, in percent of the time of the allreduce.
    """
    rows = []
    for case, _, row in rows_of(cases, measured):
        tensor_bytes, num_tensors = case.settings["num_bytes"], case.settings["num_tensors"]
        bandwidth = tensor_bytes * num_tensors / row["median_s"]
        rows.append(
            {
                **row,
                "bytes": tensor_bytes * num_tensors,
                "tensors": num_tensors,
                "buffers": case.settings["num_buffers"],
                "ranks": world_size,
                "bytes_moved_per_rank": bytes_moved(row["contender"], tensor_bytes, num_tensors, world_size),
                "algorithm_bandwidth_bytes_per_s": bandwidth,
                "bus_bandwidth_bytes_per_s": bandwidth * 2 * (world_size - 1) / world_size,
                "percent_of_copy": 100 * row["ratio"].get("copy", 1.0),
            }
        )
    return rows


def _show_moved_bytes(row: Row) -> str:
    moved = row["bytes_moved_per_rank"]
    return "" if moved is None else f"{moved / row['bytes']:.3g} S"


COLUMNS: Columns = (
    *MEASURED,
    ("GB/s", lambda row: f"{row['algorithm_bandwidth_bytes_per_s'] / 1e9:.3g}"),
    ("bus GB/s", lambda row: f"{row['bus_bandwidth_bytes_per_s'] / 1e9:.3g}"),
    ("moved", _show_moved_bytes),
    ("% of copy", lambda row: f"{row['percent_of_copy']:.3g}"),
    *multiples_of(OURS),
)
