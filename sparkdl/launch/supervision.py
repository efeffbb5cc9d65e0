"""The supervision of the ranks of a launch, on the driver.

It passes on what the ranks print and report, ends all of them if one fails or hangs, and returns their values. The
tasks that run the ranks are a :class:`~sparkdl.launch.stage.Stage`: a stage of Spark, or threads of this process.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from sparkdl.collective import Deadline
from sparkdl.launch.collect import collect
from sparkdl.launch.hangs.report import hang_error
from sparkdl.launch.hangs.watch import Hang, HangWatch
from sparkdl.launch.stage import Stage
from sparkdl.launch.task.meeting import FINISH_TIMEOUT_S
from sparkdl.launch.wire.channel import DriverChannel, RankMessage
from sparkdl.launch.wire.outcome import Failure, RankHealth, StopReason
from sparkdl.launch.wire.spec import HangLimits

_logger = logging.getLogger(__name__)

END_TIMEOUT_S = 15.0
"""Time limit for the tasks to report the stacks of their ranks and to end. A task that hangs itself does neither."""

END_AFTER_FAILURE_TIMEOUT_S = FINISH_TIMEOUT_S + END_TIMEOUT_S
"""How long the tasks may take to end once code on a rank has raised: rank 0's task may wait for the others first."""


CANCEL_TIMEOUT_S = 10.0
LAST_LINES_TIMEOUT_S = 5.0

OnLog = Callable[[int, str], None]
OnEvent = Callable[[int, dict[str, Any]], None]


class Listener:
    """Passes log lines and events of the ranks to the caller's callbacks.

    Attributes:
        on_log: called with rank and line; prints ``[rank N] line`` if None was given.
    """

    def __init__(self, on_log: OnLog | None, on_event: OnEvent | None) -> None:
        self.on_log = on_log or _print_line
        self._on_event = on_event

    def handle(self, message: RankMessage) -> None:
        """Pass on a log line or an event."""
        if message.line is not None:
            self.on_log(message.rank, message.line)
        elif message.event is not None and self._on_event is not None:
            self._on_event(message.rank, message.event)


def _print_line(rank: int, line: str) -> None:
    print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)


def supervise(
    start: Callable[[], Stage], channel: DriverChannel, limits: HangLimits, listener: Listener
) -> list[Any]:
    """Start the tasks of a launch, and return the values of their ranks, in order of rank.

    Args:
        start: function that starts the tasks.
        channel: channel to the tasks; it is closed once they have ended.
        limits: times after which a rank counts as hanging.
        listener: receives log lines and events, on this thread.

    Raises:
        LaunchError: if the ranks cannot be started.
        SlotsMissingError: if the cluster did not have the slots in time.
        RankError: if a rank fails; ``__cause__`` is its exception.
        HangError: if a rank hangs.
    """
    with ExitStack() as stack:
        stack.enter_context(channel)
        stage = start()
        try:
            guard = HangGuard(channel, limits)
            _watch(stage, channel, guard, listener)
            guard.check()
            if stage.running:
                # A rank or its task failed, and another task does not end: what was received suffices.
                channel.cancel(StopReason("a rank failed, and not all tasks ended in time"))
                stage.cancel(timeout_s=CANCEL_TIMEOUT_S)
        except BaseException as error:
            channel.cancel(StopReason(f"the driver cancelled: {type(error).__name__}"))
            stage.cancel(timeout_s=CANCEL_TIMEOUT_S)
            raise
        finally:
            if stage.running:
                _cancel_in_background(stage, channel, stack.pop_all())
        try:
            return collect(stage, channel.failures, listener.on_log, limits)
        finally:
            stage.close()


def _watch(stage: Stage, channel: DriverChannel, guard: HangGuard, listener: Listener) -> None:
    """Pass on messages until the tasks have ended or have to be ended."""
    while stage.running and stage.error is None and not guard.is_overdue:
        message = channel.next_message(0.1)
        if message is not None:
            listener.handle(message)
        guard.poll()
        stage.check_start(len(channel.started))
    # The last lines of ranks may still be on their way when their tasks have ended.
    is_running = stage.running
    timeout_s = 0.0 if is_running else LAST_LINES_TIMEOUT_S
    deadline, last_of_running = Deadline(timeout_s), Deadline(LAST_LINES_TIMEOUT_S)
    while not (is_running and last_of_running.expired):
        is_complete = channel.wait_until_disconnected(0.0)
        message = channel.next_message(0.0 if is_complete else deadline.at_most(0.1).timeout_s)
        if message is not None:
            listener.handle(message)
            deadline = Deadline(timeout_s)
        elif is_complete or deadline.expired:
            return


def _cancel_in_background(stage: Stage, channel: DriverChannel, stack: ExitStack) -> None:
    """Continue to cancel tasks that have not ended, and make tasks that still start end at once."""
    _logger.warning(
        "The tasks of this launch have not ended although they were cancelled. They are cancelled again until they "
        "have, and ranks that start until then end without running the function."
    )
    channel.ignore_messages()
    stage.cancel_in_background(stack.close)


class HangGuard:
    """Ends a launch in which a rank hangs, or in which a task does not end after a failure.

    Args:
        channel: channel to the tasks.
        limits: times after which a rank counts as hanging.
    """

    def __init__(self, channel: DriverChannel, limits: HangLimits) -> None:
        self._channel = channel
        self._watch = HangWatch(limits)
        self._found: tuple[Hang, dict[int, RankHealth]] | None = None
        self._end_by = math.inf
        self._has_failed = False

    @property
    def is_overdue(self) -> bool:
        """Whether the tasks have not ended in time after a rank hung or failed."""
        return time.monotonic() >= self._end_by

    def poll(self) -> None:
        """Check whether a rank hangs, and end all tasks if one does. Has to be called often."""
        if self._found is not None:
            return
        if not self._has_failed and _are_explained(self._channel.failures):
            self._has_failed = True
            self._end_by = time.monotonic() + END_AFTER_FAILURE_TIMEOUT_S
        now, reports = time.monotonic(), self._channel.health
        hang = self._watch.observe(now, reports)
        if hang is None:
            return
        self._found = hang, {rank: report.health for rank, report in reports.items()}
        self._end_by = min(self._end_by, now + END_TIMEOUT_S)
        self._channel.cancel(StopReason(hang.why, is_hang=True))

    def check(self) -> None:
        """Raise an error if a hang was found; to be called once the tasks have ended or are overdue.

        Raises:
            HangError: if a rank hung; the error names the rank, and the stacks of all ranks are logged.
        """
        failures = self._channel.failures
        if self._found is None or _are_explained(failures):
            return
        hang, health = self._found
        raise hang_error(hang, failures, health, self._channel.hosts)


def _are_explained(failures: Sequence[Failure]) -> bool:
    """Whether code on a rank raised, which explains why the others end or wait."""
    return any(not failure.is_consequence and not failure.is_loss for failure in failures)
