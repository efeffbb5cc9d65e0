"""Horovod's face on sparkdl's communicators: for programs that were written against ``horovod.torch``.

:mod:`sparkdl.horovod.torch` has Horovod's API; ``log_to_driver``, which is that of Databricks' ``sparkdl.horovod``,
carries messages of a rank to the driver's output. Runs on the *rank*.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["log_to_driver", "provide_driver_log"]

_MAX_CHARS = 4000

_write: list[Callable[[str], None]] = [print]
"""Holds what carries a message; ``print`` until it is given."""


def log_to_driver(message: str) -> None:
    """Print a message on the driver, also where nothing else that the ranks print is shown.

    Args:
        message: of at most 4000 characters; what is longer is cut off.
    """
    _write[0](str(message)[:_MAX_CHARS])


def provide_driver_log(write: Callable[[str], None]) -> None:
    """Have messages of this process carried by ``write``; for what starts the ranks."""
    _write[:] = [write]
