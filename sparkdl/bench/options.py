"""Command line options that several benchmarks share."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from sparkdl.data.files.filesystems import local_path
from sparkdl.errors import ParamError


def add_common_arguments(parser: argparse.ArgumentParser, *, seconds: float) -> None:
    """Declare the common options; ``seconds`` is the default duration of a measurement."""
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="how long to measure each contender at each case, about (default: %(default)s)",
    )
    parser.add_argument("--json", type=local_path, metavar="FILE", help="write the report there")
    parser.add_argument("--plot", type=local_path, metavar="FILE", help="draw it there (needs matplotlib)")


def check_common_arguments(arguments: argparse.Namespace) -> None:
    """Check the common options before anything is started.

    Raises:
        ParamError: if an option cannot work; names the option and its value.
    """
    if arguments.ranks < 2:
        raise ParamError(f"--ranks {arguments.ranks} is too few to reduce; use 2 or more.")
    if not arguments.seconds > 0:
        raise ParamError(f"--seconds {arguments.seconds:g} leaves no time to measure; use more than 0.")
    check_output_arguments(("--json", arguments.json), ("--plot", arguments.plot))
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise ParamError("--plot needs matplotlib: pip install matplotlib")


def check_output_arguments(*options: tuple[str, Path | None]) -> None:
    """Check that the folders of output files exist.

    Raises:
        ParamError: if a folder does not exist; names the option and its value.
    """
    for option, path in options:
        if path is not None and not path.absolute().parent.is_dir():
            raise ParamError(f"{option} {path} cannot be written: there is no such folder.")
