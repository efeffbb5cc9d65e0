"""Horovod's face on sparkdl's communicators: for programs that were written against ``horovod.torch``.

``log_to_driver`` is that of Databricks' ``sparkdl.horovod``.
"""

from __future__ import annotations

from sparkdl.horovod.driver_log import log_to_driver, provide_driver_log

__all__ = ["log_to_driver", "provide_driver_log"]
