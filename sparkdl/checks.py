"""Checks of what callers pass: counts, ranks, seeds, and states to resume from. Runs anywhere."""

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


def check_format(
    what: str,
    version: Any,
    newest: int,
    error: type[SparkdlError],
    *,
    writer: str | None = None,
    advice: str = "Install a newer sparkdl.",
) -> None:
    """Check that this sparkdl reads the format of a file.

    Args:
        what: what has the format, for the message.
        version: number of its format.
        newest: highest number that this sparkdl reads.
        error: class of the error.
        writer: version of sparkdl that wrote it; None if that is not known.
        advice: what to do.

    Raises:
        SparkdlError: of class ``error``, if it is another number, or none.
    """
    if not isinstance(version, int) or not 1 <= version <= newest:
        written = f", written by sparkdl {writer}" if writer else ""
        raise error(
            f"{what} has format {version}{written}; this sparkdl ({__version__}) reads formats 1 to {newest}. "
            f"{advice}"
        )


def check_state(state: Any, name: str, *parts: str, version: int | None = None) -> None:
    """Check that a state to resume from has all parts and the right version; what the parts hold is not checked.

    Args:
        state: state that a caller passes.
        name: name of the object whose state it is, such as ``feed``.
        parts: keys that the state must have.
        version: version of the state's format that this sparkdl reads; None for a state without one.

    Raises:
        ParamError: if it is something else; the message names the missing parts.
        DataError: if it has another version.
    """
    missing = [part for part in parts if not isinstance(state, Mapping) or part not in state]
    if missing:
        lacks = f" It lacks {', '.join(missing)}." if len(missing) < len(parts) else ""
        raise ParamError(
            f"This is not a state of a {name}: {str(state)[:80]}.{lacks} Give what a {name}'s state() "
            f"returned, a dict of {', '.join(parts)}."
        )
    if version is not None and state["version"] != version:
        raise DataError(
            f"The state has version {state['version']}; this sparkdl reads version {version}. Resume with "
            "the version of sparkdl that wrote it."
        )
