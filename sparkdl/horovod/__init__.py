"""Horovod's API on sparkdl's communicators, for programs that were written against ``horovod.torch``.

:mod:`sparkdl.horovod.torch` is the API: begin there. ``log_to_driver``, the function of Databricks'
``sparkdl.horovod``, prints a message of a rank on the driver. Both run on the *rank*. :func:`run` and
:mod:`sparkdl.horovod.spark` are Horovod's entries: with them the *driver* runs a function on ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdl.collective.current import provided

if TYPE_CHECKING:
    from sparkdl.horovod.runner import run

__all__ = ["log_to_driver", "run"]

_MAX_CHARS = 4000


def log_to_driver(message: str) -> None:
    """Print a message on the driver, even if other output of the ranks is not shown there.

    Args:
        message: message to print; it is cut off after 4000 characters.
    """
    provided.driver_log(str(message)[:_MAX_CHARS])


def __getattr__(name: str) -> Any:
    # Loaded on first use: ranks do not start ranks.
    if name == "run":
        from sparkdl.horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
