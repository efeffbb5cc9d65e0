"""Runs ranks again when some of them were lost, with fewer of them if slots are gone. Runs on the *driver*.

Only a loss is answered so: a process that was killed, an executor or a host that went away. What code raised on a rank
it would raise again, and that is given to the user at once, unless retries of it were asked for.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from sparkdl.errors import ClusterLostError, LossError, RankError, SlotsMissingError
from sparkdl.launch.preflight import wait_for_slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

REPLACEMENT_TIMEOUT_S = 30.0
"""How long to wait for all ranks' slots after a loss, before fewer ranks make do."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often ranks are started again, and how that is told.

    Attributes:
        max_restarts: after a loss.
        max_retries: after code on a rank raised.
        min_ranks: with how many they make do after a loss.
        start_timeout_s: how long to wait for so many slots after a loss.
        what: that goes on.
        advice: what to do when too few slots are left.
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
    """Return ``run(num_ranks)``, called again when ranks were lost.

    Args:
        run: runs so many ranks, from where they had come to.
        restarts: how often.
        spark: whose slots the ranks take; None where they are processes of this machine, which has always as many.
        num_ranks: how many there shall be.
        where: tells from where the ranks go on.
        resources: what each rank takes of the cluster, where that is not what all tasks take.

    Raises:
        LossError: that of the last call, when there were too many.
        RankError: likewise.
        SlotsMissingError: if fewer than ``min_ranks`` slots are left. With more it is tried again with a rank less
            after a loss, which counts as the same restart.
    """
    ranks = num_ranks
    num_restarts = num_retries = 0
    lost: LossError | None = None
    while True:
        try:
            return run(ranks)
        except ClusterLostError:
            raise  # there is no application left that could start ranks
        except LossError as error:
            if num_restarts == restarts.max_restarts:
                raise
            num_restarts += 1
            lost = error
            ranks = _ranks_left(lost, restarts, spark, num_ranks, resources)
            count = f"restart {num_restarts} of {restarts.max_restarts}"
            _tell(error, restarts, ranks, num_ranks, where(), count)
        except SlotsMissingError as error:
            # Spark Connect tells no number of slots, and elsewhere more may be lost since they were counted.
            if lost is None or ranks <= restarts.min_ranks:
                raise
            ranks = _ranks_left(lost, restarts, spark, ranks - 1, resources)
            count = f"still restart {num_restarts} of {restarts.max_restarts}"
            _tell(error, restarts, ranks, num_ranks, where(), count)
        except RankError as error:
            if num_retries == restarts.max_retries:
                raise
            num_retries += 1
            count = f"retry {num_retries} of {restarts.max_retries}"
            _tell(error, restarts, ranks, num_ranks, where(), count)


def _ranks_left(
    error: LossError,
    restarts: Restarts,
    spark: SparkSession | None,
    num_ranks: int,
    resources: ResourceProfile | None,
) -> int:
    """With how many ranks to go on, ``num_ranks`` at most; so many where Spark does not say how many there can be."""
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


def _tell(error: Exception, restarts: Restarts, ranks: int, num_ranks: int, where: str, count: str) -> None:
    logger.warning(
        "%s The %s goes on with %d of %d ranks from %s: %s.",
        _line(error),
        restarts.what,
        ranks,
        num_ranks,
        where,
        count,
    )


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") + "."
