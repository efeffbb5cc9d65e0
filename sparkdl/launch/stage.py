"""The interface between the supervision of ranks on the driver and the tasks that run them, in Spark or in threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import IO, Any, Protocol

_logger = logging.getLogger(__name__)

BACKGROUND_CANCEL_TIMEOUT_S = 900.0
"""How long a cancellation goes on in the background: longer than Spark checks for slots by default, 40 times 15 s."""


class Cancellable(Protocol):
    """Tasks or calls that another thread can end."""

    @property
    def running(self) -> bool:
        """Whether a task may still run or start."""

    def cancel(self, *, timeout_s: float) -> None:
        """Cancel the tasks until they have ended or the time is over."""


def cancel_in_background(tasks: Cancellable, finish: Callable[[], None] = lambda: None) -> None:
    """Continue to cancel tasks in a thread, without waiting for them; the thread then calls ``finish``."""

    def cancel() -> None:
        try:
            tasks.cancel(timeout_s=BACKGROUND_CANCEL_TIMEOUT_S)
            if tasks.running:
                _logger.warning(
                    "Tasks that were cancelled still run after %g s. If Spark runs them, kill their job in Spark's UI, "
                    "or stop the session.",
                    BACKGROUND_CANCEL_TIMEOUT_S,
                )
        finally:
            finish()

    threading.Thread(target=cancel, name="sparkdl-cancel", daemon=True).start()


class Stage(Cancellable, Protocol):
    """The tasks of a launch, one for each rank, from their start on.

    :class:`~sparkdl.launch.spark_job.SparkJob` is a barrier stage of Spark,
    :class:`~sparkdl.launch.local_stage.LocalStage` runs the tasks as threads of this process.

    Attributes:
        spark: session that runs the stage; None without Spark.
        num_ranks: number of ranks of the launch.
        was_cancelled_here: whether :meth:`cancel` has cancelled a stage of Spark.
    """

    spark: Any
    num_ranks: int
    was_cancelled_here: bool = False

    @property
    def error(self) -> Exception | None:
        """The exception that ended the tasks; None without one. A rank's failure is an outcome, and not an error."""

    def check_start(self, num_started: int) -> None:  # noqa: ARG002 - for a stage of Spark
        """Check whether the ranks start in time; to be called often, with the number of ranks that have started.

        Does nothing for tasks that start at once.

        Raises:
            SlotsMissingError: if Spark has not started the tasks in time.
        """
        return

    @property
    def is_to_leave(self) -> bool:
        """Whether the machine of a task is to go soon, as an executor that Spark decommissions."""
        return False

    def call_at_end(self, wake: Callable[[], None]) -> None:  # noqa: ARG002 - for tasks of this process
        """Call ``wake`` from some thread once the tasks have ended, at least once.

        Does nothing for an offered slot, whose end another process sees.
        """
        return

    def outcomes(self) -> list[tuple[int, str, int]]:
        """Rank, kind and number of chunks of everything that the tasks yielded."""

    def fetch(self, rank: int, kind: str, num_chunks: int, into: IO[bytes]) -> None:
        """Write the body of one outcome into a file."""

    def close(self) -> None:
        """Release the outcomes."""
