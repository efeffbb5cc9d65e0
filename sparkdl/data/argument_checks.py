"""Checks of the numbers that callers of the data floor give. Runs anywhere."""

from __future__ import annotations

import operator
import threading
from numbers import Real
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


def check_seconds(**arguments: Any) -> None:
    """Check that arguments are numbers of seconds above 0 that can be waited for, NumPy's too.

    Raises:
        ParamError: if one is not; it names it with its value.
    """
    for name, value in arguments.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not 0 < value <= threading.TIMEOUT_MAX:
            raise ParamError(
                f"{name} must be a number of seconds above 0 and at most {threading.TIMEOUT_MAX:.0f}, got {value!r}."
            )
