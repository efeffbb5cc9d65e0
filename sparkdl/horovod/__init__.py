"""Horovod's API on sparkdl's communicators, for programs that were written against ``horovod.torch``.

:mod:`sparkdl.horovod.torch` is the API: begin there. ``log_to_driver``, the function of Databricks'
``sparkdl.horovod``, prints a message of a rank on the driver. Both run on the *rank*. :func:`run` and
:mod:`sparkdl.horovod.spark` are Horovod's entries: with them the *driver* runs a function on ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.collective.current import provided
from sparkdl.lazy import attributes

if TYPE_CHECKING:
    from sparkdl.horovod.runner import run

__all__ = ["log_to_driver", "run"]

__getattr__, __dir__ = attributes(__name__, {"run": "sparkdl.horovod.runner"})  # ranks do not start ranks

_MAX_CHARS = 4000


def log_to_driver(message: str) -> None:
    """Print a message on the driver, even if other output of the ranks is not shown there.

    Args:
        message: message to print; it is cut off after 4000 characters.
    """
    provided.driver_log(str(message)[:_MAX_CHARS])
