"""Checks of what callers pass: counts, ranks, seeds, formats, and states to resume from. Runs anywhere."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from sparkdl import __version__
from sparkdl.errors import DataError, ParamError, SparkdlError


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


def check_format(what: str, saved: Mapping[str, Any], newest: int, error: type[SparkdlError]) -> None:
    """Check that this sparkdl reads the format of something that was saved: the number under its key ``format``.

    Args:
        what: what was saved, for the message.
        saved: its content; if it has a ``sparkdl_version``, the message names it as the version that wrote it.
        newest: highest number that this sparkdl reads.
        error: class of the error.

    Raises:
        SparkdlError: of class ``error``, if the number is higher, or is no number.
        KeyError: if there is no number, so that sparkdl has not saved it.
    """
    number = saved["format"]
    if not isinstance(number, int) or number > newest:
        writer = f", written by sparkdl {saved['sparkdl_version']}" if "sparkdl_version" in saved else ""
        raise error(
            f"{what} has format {number}{writer}; this sparkdl ({__version__}) reads formats up to {newest}. Install a "
            "newer sparkdl."
        )


def check_state(state: Any, name: str, newest: int, *parts: str) -> None:
    """Check that a state to resume from has all parts, and a format that this sparkdl reads.

    What the parts hold is not checked.

    Args:
        state: state that a caller passes.
        name: name of the object whose state it is, such as ``feed``.
        newest: highest number of the state's format that this sparkdl reads.
        parts: keys that the state must have besides ``format``.

    Raises:
        ParamError: if it is something else; the message names the missing parts.
        DataError: if it has a higher format.
    """
    parts = ("format", *parts)
    missing = [part for part in parts if not isinstance(state, Mapping) or part not in state]
    if missing:
        lacks = f" It lacks {', '.join(missing)}." if len(missing) < len(parts) else ""
        raise ParamError(
            f"This is not a state of a {name}: {str(state)[:80]}.{lacks} Give what a {name}'s state() "
            f"returned, a dict of {', '.join(parts)}."
        )
    check_format(f"The state of the {name}", state, newest, DataError)
