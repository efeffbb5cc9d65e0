"""A Spark job that may take only so long: it is cancelled then, and soon nobody waits for it. Runs on the *driver*."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from sparkdl.errors import LaunchError
from sparkdl.launch.tagged_call import TaggedCall

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

CANCEL_TIMEOUT_S = 5.0
"""How long the job may take to end once it is cancelled, before that is left to a thread."""


def collect_within(spark: SparkSession, frame: DataFrame, timeout_s: float) -> list[Row]:
    """Collect a DataFrame.

    Raises:
        LaunchError: if that takes longer; the job is cancelled.
        Exception: what Spark raises.
    """
    call = TaggedCall(spark, f"sparkdl-{secrets.token_hex(8)}", frame.collect)
    try:
        call.join(timeout_s)
    except BaseException:  # Ctrl-C
        _cancel(call)
        raise
    if call.running:
        _cancel(call)
        raise LaunchError(
            f"the cluster had not run the tasks within {timeout_s:g} s: other jobs hold its slots, or executors are "
            "missing"
        )
    if call.error is not None:
        raise call.error
    assert call.value is not None, "it has ended well"
    return call.value


def _cancel(call: TaggedCall[list[Row]]) -> None:
    try:
        call.cancel(timeout_s=CANCEL_TIMEOUT_S)
    finally:
        if call.running:
            call.leave_behind()
