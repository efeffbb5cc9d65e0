"""Horovod's API on sparkdl's communicators, for programs that were written against ``horovod.torch``.

:mod:`sparkdl.horovod.torch` is the API: begin there. ``log_to_driver``, the function of Databricks'
``sparkdl.horovod``, prints a message of a rank on the driver. Runs on the *rank*.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["log_to_driver", "provide_driver_log"]

_MAX_CHARS = 4000

_write: list[Callable[[str], None]] = [print]
"""The function that carries a message to the driver, as the only entry; ``print`` until another one is provided."""


def log_to_driver(message: str) -> None:
    """Print a message on the driver, even if other output of the ranks is not shown there.

    Args:
        message: message to print; it is cut off after 4000 characters.
    """
    _write[0](str(message)[:_MAX_CHARS])


def provide_driver_log(write: Callable[[str], None]) -> None:
    """Set the function that carries messages of this process to the driver. For launchers of ranks."""
    _write[:] = [write]
