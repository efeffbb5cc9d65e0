"""What a task of the doctor does: the first of each executor looks around. Runs on an executor."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from sparkdl.doctor.machine_facts import look_around

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext


def look_from_task(context: BarrierTaskContext, timeout_s: float) -> dict[str, Any]:
    """Return the executor's name, and what it has if this task is the one to look."""
    # Python workers are forked from one process for each executor.
    executor = f"{socket.gethostname()} {os.getppid()}"
    executors = context.allGather(executor)
    is_first = executors.index(executor) == context.partitionId()
    facts = look_around(timeout_s=timeout_s).to_fields() if is_first else None
    return {"executor": executor, "facts": facts}
