"""Runs the ranks of a fit again when some of them were lost, with fewer of them if slots are gone. On the *driver*.

Only a loss is answered so: a process that was killed, an executor or a host that went away. What code raised on a rank
it would raise again, and that is given to the user at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from sparkdl.errors import LaunchError, LossError
from sparkdl.launch import wait_for_slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

REPLACEMENT_TIMEOUT_S = 30.0
"""How long the cluster may take to put another executor in the place of one that was lost."""


def run_with_restarts(
    run: Callable[[int], Result],
    *,
    spark: SparkSession,
    num_ranks: int,
    min_ranks: int,
    max_restarts: int,
    where: Callable[[], str],
) -> Result:
    """Return ``run(num_ranks)``, called again when ranks were lost.

    Args:
        run: runs the fit on so many ranks, from its last checkpoint.
        spark: whose slots the ranks take.
        num_ranks: how many there shall be.
        min_ranks: with how many the fit makes do after a loss.
        max_restarts: how often it is called again.
        where: tells from where the fit goes on.

    Raises:
        LossError: that of the last call, when there were too many.
        LaunchError: if fewer than ``min_ranks`` slots are left.
    """
    ranks = num_ranks
    for restart in range(1, max_restarts + 1):
        try:
            return run(ranks)
        except LossError as error:
            slots = wait_for_slots(spark, num_ranks, timeout_s=REPLACEMENT_TIMEOUT_S)
            ranks = num_ranks if slots is None else min(num_ranks, slots)
            if ranks < min_ranks:
                raise LaunchError(
                    f"{slots} slots are left after ranks were lost, and the fit needs {min_ranks}. Lower minWorkers, "
                    f"or fit again with the same checkpointDir when there are more. What was lost: {_line(error)}"
                ) from error
            logger.warning(
                "%s The fit goes on with %d of %d ranks from %s: restart %d of %d.",
                _line(error),
                ranks,
                num_ranks,
                where(),
                restart,
                max_restarts,
            )
    return run(ranks)


def _line(error: LossError) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") + "."
