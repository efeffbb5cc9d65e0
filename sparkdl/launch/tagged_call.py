"""A call that runs Spark jobs, in a thread of its own and under a tag, so that it can be cancelled.

Runs on the *driver*, with classic Spark and Spark Connect.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparkdl.collective import Deadline
from sparkdl.launch.preflight import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CANCEL_INTERVAL_S = 1.0
"""How often the order to cancel is given again: Spark applies it to jobs that are active, and one that it has not been
given yet, or that waits for executors as its barrier stage has more tasks than there are slots, is none."""

LEFT_BEHIND_TIMEOUT_S = 900.0
"""For how long a call that nobody waits for is cancelled: more than Spark by default looks for slots, 40 times 15 s."""

_logger = logging.getLogger(__name__)
Value = TypeVar("Value")


class TaggedCall(Generic[Value]):
    """Calls a function at once, in a thread with the caller's job group, description, scheduler pool and tags.

    Args:
        spark: classic or Connect session.
        tag: of all jobs that the function runs; nobody else's.
        function: what to call.

    Attributes:
        tag: the tag.
        value: what the function returned; None before that, and if it raised.
        error: what it raised, or Spark as it was to tag its jobs.
        was_given_up: whether it was cancelled by :meth:`cancel`, and not, say, in Spark's UI.
    """

    def __init__(self, spark: SparkSession, tag: str, function: Callable[[], Value]) -> None:
        self._spark = spark
        self.tag = tag
        self._function: Callable[[], Value] | None = function
        self.value: Value | None = None
        self.error: Exception | None = None
        self.was_given_up = False
        # Of this thread, by which the caller may cancel what it runs; classic Spark's threads inherit theirs.
        self._callers_tags = spark.getTags() if is_connect(spark) else set()
        # Waited for in the thread's place: Python 3.11 takes a thread for ended when Ctrl-C comes out of its join().
        self._ended = threading.Event()
        _inheriting_thread(spark, self._call).start()

    @property
    def running(self) -> bool:
        """Whether the function has not returned yet."""
        return not self._ended.is_set()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, for so long."""
        self._ended.wait(timeout_s)

    def cancel(self, *, timeout_s: float) -> None:
        """Cancel its jobs, those that it has yet to run too, until it has ended; for so long."""
        self.was_given_up = True
        deadline, is_told = Deadline(timeout_s), False
        while self.running:
            try:
                self._order_cancellation()
            except Exception as error:
                # Of py4j or gRPC, and not raised: whoever cancels has something of more interest to raise.
                if not is_told:
                    _logger.warning(
                        "Spark did not take the order to cancel the jobs of %s: %s", self.tag, error
                    )
                is_told = True
            self._ended.wait(min(CANCEL_INTERVAL_S, deadline.remaining_s()))
            if deadline.expired:
                return

    def leave_behind(self, finish: Callable[[], None] = lambda: None) -> None:
        """Go on cancelling it from a thread, without waiting for that; then call ``finish`` there."""

        def cancel() -> None:
            try:
                self.cancel(timeout_s=LEFT_BEHIND_TIMEOUT_S)
                if self.running:
                    _logger.warning(
                        "Spark has not cancelled the jobs tagged %s within %g s. End them in Spark's UI, or stop the "
                        "session.",
                        self.tag,
                        LEFT_BEHIND_TIMEOUT_S,
                    )
            finally:
                finish()

        threading.Thread(target=cancel, name="sparkdl-left-behind", daemon=True).start()

    def _order_cancellation(self) -> None:
        if is_connect(self._spark):
            self._spark.interruptTag(self.tag)
        else:
            self._spark.sparkContext.cancelJobsWithTag(self.tag)

    def _call(self) -> None:
        tagging: Any = self._spark if is_connect(self._spark) else self._spark.sparkContext
        add, remove = ("addTag", "removeTag") if is_connect(self._spark) else ("addJobTag", "removeJobTag")
        try:
            for tag in (self.tag, *self._callers_tags):
                getattr(tagging, add)(tag)
            assert self._function is not None
            self.value = self._function()
        except Exception as error:
            self.error = error
        finally:
            # It may hold who holds this call: with it, the value would live until the garbage collector comes by.
            self._function = None
            try:
                getattr(tagging, remove)(self.tag)
            finally:
                self._ended.set()


def _inheriting_thread(spark: SparkSession, target: Callable[[], None]) -> threading.Thread:
    if is_connect(spark):
        return threading.Thread(target=target, name="sparkdl-job", daemon=True)
    from pyspark import InheritableThread

    thread: threading.Thread = InheritableThread(target=target, name="sparkdl-job", daemon=True)
    return thread
