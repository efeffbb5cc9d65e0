"""Restarts ranks after some of them were lost, with fewer ranks if slots are gone.

Only a loss leads to a restart: a process that was killed, an executor or a host that went away. Code that raised on a
rank would raise again, so its exception is raised at once, unless retries were asked for.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from sparkdl.errors import ClusterLostError, LinkLostError, ProcessesLostError, RankError, SlotsMissingError
from sparkdl.launch.slots import wait_for_slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

REPLACEMENT_TIMEOUT_S = 30.0
"""How long to wait for all ranks' slots after a loss, before fewer ranks are started."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often ranks are restarted, and the words for it in messages.

    Attributes:
        max_restarts: maximum number of restarts after a loss.
        max_retries: maximum number of restarts after code on a rank raised, or a connection between ranks was cut.
        min_ranks: minimum number of ranks after a loss.
        start_timeout_s: seconds to wait for the slots of ``min_ranks`` ranks after a loss.
        what: word for what is restarted.
        advice: text that says what to do if too few slots are left.
    """

    max_restarts: int
    max_retries: int = 0
    min_ranks: int
    start_timeout_s: float = 300.0
    what: str = "fit"
    advice: str = "Lower minWorkers, or fit again with the same checkpointDir when there are more."


def run_with_restarts(
    run: Callable[[int], Result],
    restarts: Restarts,
    *,
    spark: SparkSession | None,
    num_ranks: int,
    where: Callable[[], str],
    resources: ResourceProfile | None = None,
) -> Result:
    """Call ``run(num_ranks)``, again if ranks are lost, and return its value.

    Args:
        run: function that runs the given number of ranks, from the last checkpoint or commit on.
        restarts: limits of the restarts.
        spark: session whose slots the ranks take; None for ranks on this machine, which need no slots.
        num_ranks: wanted number of ranks.
        where: function that returns a description of where the ranks continue.
        resources: resources of each rank's task, if they differ from the application's default; None if they do not.

    Raises:
        ProcessesLostError: if ranks are lost more than ``max_restarts`` times; it is the error of the last call.
        RankError: if code on a rank raises more than ``max_retries`` times; it is the error of the last call.
        SlotsMissingError: if the first call has too few slots, or fewer than ``min_ranks`` are left after a loss. With
            more slots left, a call that has too few is repeated with one rank less, as part of the same restart.
    """
    ranks = num_ranks
    num_restarts = num_retries = 0
    lost: ProcessesLostError | None = None

    def log(error: Exception, what: str, number: int, most: int) -> None:
        logger.warning(
            "%s The %s continues with %d of %d ranks from %s: %s %d of %d.",
            *(_line(error), restarts.what, ranks, num_ranks, where(), what, number, most),
        )

    while True:
        try:
            return run(ranks)
        except ClusterLostError:
            raise  # no application is left that could start ranks
        except SlotsMissingError as error:
            # Spark Connect does not report the number of slots, and more may have been lost since they were counted.
            if lost is None or ranks <= restarts.min_ranks:
                raise
            ranks = _ranks_left(lost, restarts, spark, ranks - 1, resources)
            log(error, "still restart", num_restarts, restarts.max_restarts)
        except (ProcessesLostError, RankError) as error:
            if isinstance(error, ProcessesLostError) and num_restarts < restarts.max_restarts:
                num_restarts += 1
                lost = error
                ranks = _ranks_left(lost, restarts, spark, num_ranks, resources)
                log(error, "restart", num_restarts, restarts.max_restarts)
                continue
            # After a cut link no process was lost: all ranks may start again at once.
            is_of_code = isinstance(error, LinkLostError) or not isinstance(error, ProcessesLostError)
            if not is_of_code or num_retries == restarts.max_retries:
                raise
            num_retries += 1
            log(error, "retry", num_retries, restarts.max_retries)


def _ranks_left(
    error: ProcessesLostError,
    restarts: Restarts,
    spark: SparkSession | None,
    num_ranks: int,
    resources: ResourceProfile | None,
) -> int:
    """Number of ranks to start after a loss, at most ``num_ranks``; all of them if Spark does not report its slots."""
    if spark is None:
        return num_ranks
    began, timeout_s = time.monotonic(), min(REPLACEMENT_TIMEOUT_S, restarts.start_timeout_s)
    slots = wait_for_slots(spark, num_ranks, timeout_s=timeout_s, resources=resources, is_logged=True)
    if slots is not None and slots < restarts.min_ranks:
        timeout_s = restarts.start_timeout_s - timeout_s
        slots = wait_for_slots(
            spark, restarts.min_ranks, timeout_s=timeout_s, resources=resources, is_logged=True
        )
    ranks = num_ranks if slots is None else min(num_ranks, slots)
    if ranks < restarts.min_ranks:
        waited_s = time.monotonic() - began
        waited = f" {waited_s:.0f} s" if waited_s >= 1 else ""
        raise SlotsMissingError(
            f"{slots} slots are left{waited} after ranks were lost, and the {restarts.what} needs "
            f"{restarts.min_ranks}. "
            f"{restarts.advice} What was lost: {_line(error)}"
        ) from error
    return ranks


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") + "."
