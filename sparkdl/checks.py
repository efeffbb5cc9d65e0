"""Checks of whole numbers that callers pass: counts, ranks and seeds. Runs anywhere."""

from __future__ import annotations

import operator
from typing import Any

from sparkdl.errors import ParamError


def check_integer(**arguments: Any) -> None:
    """Check that arguments are whole numbers, of Python or NumPy.

    Raises:
        ParamError: if one is not; the message has its name and value.
    """
    for name, value in arguments.items():
        try:
            operator.index(value)
        except TypeError:
            raise ParamError(f"{name} must be a whole number, got {value!r}.") from None


def check_counts(*, least: int, **arguments: Any) -> None:
    """Check that arguments are whole numbers of at least ``least``.

    Raises:
        ParamError: if one is not; the message has its name and value.
    """
    check_integer(**arguments)
    for name, value in arguments.items():
        if value < least:
            raise ParamError(f"{name} must be at least {least}, got {value}.")


def check_rank(rank: int, world_size: int) -> None:
    """Check that a rank is one of ``world_size`` ranks.

    Raises:
        ParamError: if it is not.
    """
    check_counts(least=0, rank=rank)
    if rank >= world_size:
        raise ParamError(f"rank must be in [0, {world_size}), got {rank}.")
