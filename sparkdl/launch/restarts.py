"""Starts ranks until they succeed: again after some of them were lost, with fewer ranks if slots are gone.

Only a loss leads to a restart: a process that was killed, an executor or a host that went away. Code that raised on a
rank would raise again, so its exception is raised at once, unless retries were asked for.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.errors import ClusterLostError, LinkLostError, ProcessesLostError, RankError, SlotsMissingError
from sparkdl.launch.slots import wait_for_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from sparkdl.data.files.lease import SoleLease
    from sparkdl.launch.elastic.roster import ElasticLimits

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
        elastic: limits of an elastic launch, whose lost ranks are started again one by one, without a restart of all;
            None for ranks that start and end together.
    """

    max_restarts: int
    max_retries: int = 0
    min_ranks: int
    start_timeout_s: float = 300.0
    what: str = "fit"
    advice: str = "Lower minWorkers, or fit again with the same checkpointDir when there are more."
    elastic: ElasticLimits | None = None


@dataclass(frozen=True)
class Start:
    """One start of the ranks.

    Attributes:
        num_ranks: number of ranks.
        number: number of starts before this one.
        lease: name under which these ranks use the folder of their checkpoints; empty without one, and in an elastic
            launch, in which each world gets its own.
        options: arguments ``elastic`` and ``leases`` of the launch; empty for ranks that start and end together.
    """

    num_ranks: int
    number: int = 0
    lease: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def hold_place(
    url: str | None,
    temporary: Callable[[], AbstractContextManager[str]] | None,
    on_wait: Callable[[str], None],
    **words: str,
) -> Iterator[SoleLease | None]:
    """Hold alone the folder from which restarted ranks continue; None if there is none.

    Args:
        url: URL of the folder; None for a temporary one.
        temporary: function that makes a folder which is removed at the end; None for no temporary folder.
        on_wait: function that is called with a text if this process has to wait.
        words: arguments ``user`` and ``setting`` of :func:`~sparkdl.data.files.lease.hold_alone`.

    Raises:
        CheckpointsInUseError: if another process uses the folder, or may have used it before the end of this one.
        StoreError: if the folder cannot be written.
    """
    from sparkdl.data.files.lease import hold_alone  # on the driver only: ranks start faster without it

    with ExitStack() as resources:
        if url is None and temporary is not None:
            url = resources.enter_context(temporary())
        yield None if url is None else resources.enter_context(hold_alone(url, on_wait, **words))


def run_with_restarts(
    run: Callable[[Start], Result],
    restarts: Restarts,
    *,
    lease: SoleLease | None = None,
    spark: SparkSession | None,
    num_ranks: int,
    where: Callable[[], str],
    resources: ResourceProfile | None = None,
) -> Result:
    """Call ``run`` with a start of the ranks, again if ranks are lost, and return its value.

    Args:
        run: function that runs the ranks of a start, from the last checkpoint or commit on.
        restarts: limits of the restarts.
        lease: the driver's lease of the folder of checkpoints, whose name changes with each start, so that ranks that
            were wrongly considered lost cannot write any more; None if there is no folder.
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
    leases = repeat("") if lease is None else lease.names()
    if restarts.elastic is not None:
        return run(Start(num_ranks, options={"elastic": restarts.elastic, "leases": leases}))
    ranks, numbers = num_ranks, count()
    num_restarts = num_retries = 0
    lost: ProcessesLostError | None = None

    def log(error: Exception, what: str, number: int, most: int) -> None:
        logger.warning(
            "%s The %s continues with %d of %d ranks from %s: %s %d of %d.",
            *(_line(error), restarts.what, ranks, num_ranks, where(), what, number, most),
        )

    while True:
        try:
            return run(Start(ranks, next(numbers), next(leases)))
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
