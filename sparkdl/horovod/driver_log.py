"""Messages from a rank to the driver's output, as Databricks' HorovodRunner has them. Runs on a *rank*."""

from __future__ import annotations

from collections.abc import Callable

MAX_CHARS = 4000

_write: list[Callable[[str], None]] = [print]
"""Holds what carries a message; ``print`` where nobody provided anything."""


def log_to_driver(message: str) -> None:
    """Print a message on the driver, also where nothing else that the ranks print is shown.

    Args:
        message: of at most 4000 characters; what is longer is cut off.
    """
    _write[0](str(message)[:MAX_CHARS])


def provide_driver_log(write: Callable[[str], None]) -> None:
    """Have messages of this process carried by ``write``; for whoever starts the ranks."""
    _write[:] = [write]
