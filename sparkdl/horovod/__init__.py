"""Horovod's API on sparkdl's communicators, for programs that were written against ``horovod.torch``.

:mod:`sparkdl.horovod.torch` is the API: begin there. ``log_to_driver``, the function of Databricks'
``sparkdl.horovod``, prints a message of a rank on the driver. Runs on the *rank*.
"""

from __future__ import annotations

from sparkdl.collective.current import log_on_driver

__all__ = ["log_to_driver"]

_MAX_CHARS = 4000


def log_to_driver(message: str) -> None:
    """Print a message on the driver, even if other output of the ranks is not shown there.

    Args:
        message: message to print; it is cut off after 4000 characters.
    """
    log_on_driver(str(message)[:_MAX_CHARS])
