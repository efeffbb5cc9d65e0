"""Command line options that several benchmarks share."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from sparkdl.data.files.filesystems import local_path
from sparkdl.errors import ParamError
from sparkdl.foreign_errors import how_to_install

_OPTIONS: dict[str, dict[str, Any]] = {
    "ranks": {"type": int, "default": 2, "help": "number of ranks (default: %(default)s)"},
    "seconds": {
        "type": float,
        "help": "how long to measure each contender at each case, about (default: %(default)s)",
    },
    "scale": {
        "type": float,
        "default": 1.0,
        "help": "how many times the usual rows to take (default: %(default)s)",
    },
    "device": {
        "choices": ("cpu", "cuda"),
        "default": "cpu",
        "help": "where the ranks train; cuda takes a GPU for each rank (default: %(default)s)",
    },
    "json": {"type": local_path, "metavar": "FILE", "help": "write the report there"},
    "plot": {"type": local_path, "metavar": "FILE", "help": "draw it there (needs matplotlib)"},
}

_PICTURES = (".png", ".svg", ".pdf")
"""Endings of pictures that matplotlib draws without another library."""


def add_common_arguments(parser: argparse.ArgumentParser, *names: str, seconds: float | None = None) -> None:
    """Declare common options; ``seconds`` is the default duration of a measurement."""
    for name in names:
        options = _OPTIONS[name] | ({"default": seconds} if name == "seconds" else {})
        parser.add_argument(f"--{name}", **options)


def parse_counts(text: str, what: str = "ranks") -> list[int]:
    """Parse ``--ranks``, or another option that holds numbers separated by commas; return them in ascending order.

    Raises:
        ParamError: if it is not a list of numbers.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ParamError(f"--{what} {text} is not a list of numbers of {what}, such as 1,2,4.")
    return sorted({int(part) for part in parts})


def parse_rates(text: str) -> list[float]:
    """Parse ``--megabits``, rates separated by commas.

    Raises:
        ParamError: if it is not a list of numbers above 0.
    """
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ParamError(f"--megabits {text} is not a list of numbers.") from error
    if min(rates) <= 0:
        raise ParamError(f"--megabits {text} has a rate that is not above 0.")
    return rates


def check_gpus(ranks: int) -> None:
    """Check that this machine has a GPU for each rank.

    Raises:
        ParamError: if it has fewer.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus < ranks:
        raise ParamError(
            f"--device cuda needs a GPU for each of {ranks} ranks, and torch {torch.__version__} sees {num_gpus}."
        )


def check_common_arguments(arguments: argparse.Namespace, **least: int) -> None:
    """Check the common options before anything is started.

    Args:
        arguments: options of a benchmark.
        least: smallest number of further options that are counts.

    Raises:
        ParamError: if an option cannot work; names the option and its value.
    """
    for name, number in least.items():
        if getattr(arguments, name) < number:
            raise ParamError(f"--{name} {getattr(arguments, name)} is too few; use {number} or more.")
    if "seconds" in arguments and not arguments.seconds > 0:
        raise ParamError(f"--seconds {arguments.seconds:g} leaves no time to measure; use more than 0.")
    if "scale" in arguments and not 0 < arguments.scale <= 100:
        raise ParamError(f"--scale {arguments.scale:g}: use more than 0, and at most 100 times the rows.")
    for name in ("json", "plot"):
        path = getattr(arguments, name, None)
        if path is not None and not path.absolute().parent.is_dir():
            raise ParamError(f"--{name} {path} cannot be written: there is no such folder.")
    picture = getattr(arguments, "plot", None)
    if picture is None:
        return
    if find_spec("matplotlib") is None:
        raise ParamError(f"--plot needs matplotlib. {how_to_install('plot', 'matplotlib')}")
    if picture.suffix not in _PICTURES:
        raise ParamError(f"--plot {picture}: its name must end in {', '.join(_PICTURES)}.")
