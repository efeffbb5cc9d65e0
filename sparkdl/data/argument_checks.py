"""Checks of the numbers that callers of the data floor give. Runs anywhere."""

from __future__ import annotations

import operator
from typing import Any

from sparkdl.errors import ParamError


def check_integer(**arguments: Any) -> None:
    """Check that arguments are whole numbers, NumPy's too.

    Raises:
        ParamError: if one is not; it names it with its value.
    """
    for name, value in arguments.items():
        try:
            operator.index(value)
        except TypeError:
            raise ParamError(f"{name} must be a whole number, got {value!r}.") from None


def check_counts(*, least: int, **arguments: Any) -> None:
    """Check that arguments are whole numbers of at least ``least``.

    Raises:
        ParamError: if one is not; it names it with its value.
    """
    check_integer(**arguments)
    for name, value in arguments.items():
        if value < least:
            raise ParamError(f"{name} must be at least {least}, got {value}.")
