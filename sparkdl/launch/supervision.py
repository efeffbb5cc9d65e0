"""The supervision of the ranks of a launch, on the driver.

It passes on what the ranks print and report, ends all of them if one fails or hangs, and returns their values. The
tasks that run the ranks are a :class:`~sparkdl.launch.stage.Stage`: a stage of Spark, or threads of this process.
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import IO, Any

from sparkdl.collective import Deadline
from sparkdl.errors import ExecutorsLostError, LaunchError, SerializationError, SparkdlError
from sparkdl.foreign_errors import errors_as
from sparkdl.launch.failures import raise_for_failures
from sparkdl.launch.hangs.hang_error import hang_error
from sparkdl.launch.hangs.watch import Hang, HangWatch
from sparkdl.launch.lines import AlikeLines
from sparkdl.launch.stage import Stage, cancel_in_background
from sparkdl.launch.task.meeting import FINISH_TIMEOUT_S
from sparkdl.launch.wire.channel import DriverChannel, RankMessage
from sparkdl.launch.wire.outcome import Failure, StopReason
from sparkdl.launch.wire.spec import HangLimits
from sparkdl.topology import name_ranks

_logger = logging.getLogger(__name__)

END_TIMEOUT_S = 15.0
"""Time limit for the tasks to report the stacks of their ranks and to end. A task that hangs itself does neither."""

END_AFTER_FAILURE_TIMEOUT_S = FINISH_TIMEOUT_S + END_TIMEOUT_S
"""How long the tasks may take to end once code on a rank has raised: rank 0's task may wait for the others first."""


CANCEL_TIMEOUT_S = 10.0
_MOST_MESSAGES = 1000
"""How many messages are passed on before the tasks are looked at again."""

_NO_LIMITS = HangLimits(hang_timeout_s=math.inf, operation_timeout_s=math.inf, silence_timeout_s=math.inf)
LAST_LINES_TIMEOUT_S = 5.0

OnLog = Callable[[int, str], None]
OnEvent = Callable[[int, dict[str, Any]], None]


class Listener:
    """Passes log lines and events of the ranks to the caller's callbacks.

    Args:
        on_log: called with rank and line; prints ``[rank N] line`` when None, and lines that ranks print alike once.
        on_event: called with rank and event; events are dropped when None.
        num_ranks: number of ranks whose lines are joined; None if it is not known, as in an elastic launch.
        first_rank: number of the launch's first rank for the callbacks.
    """

    def __init__(
        self,
        on_log: OnLog | None,
        on_event: OnEvent | None,
        *,
        num_ranks: int | None = None,
        first_rank: int = 0,
    ) -> None:
        self._on_log = on_log or AlikeLines(_print_line)
        self._on_event = on_event
        self._first_rank = first_rank
        if isinstance(self._on_log, AlikeLines):
            self._on_log.num_ranks = num_ranks or 0

    def log(self, rank: int, line: str) -> None:
        """Pass on a line that a rank has printed."""
        self._on_log(self._first_rank + rank, line)

    def handle(self, message: RankMessage) -> None:
        """Pass on a log line or an event."""
        if message.line is not None:
            self.log(message.rank, message.line)
        elif message.event is not None and self._on_event is not None:
            self._on_event(self._first_rank + message.rank, message.event)

    def show_due(self, *, is_end: bool = False) -> None:
        """Show lines that were held back to be joined with those of other ranks."""
        if isinstance(self._on_log, AlikeLines):
            self._on_log.show_due(is_end=is_end)


def _print_line(ranks: Sequence[int], line: str) -> None:
    print(f"[{name_ranks(ranks)}] {line}", file=sys.stderr, flush=True)


class Supervision:
    """The supervision of the tasks of a launch, from their start to the values of their ranks; a context manager.

    Call :meth:`poll` until it returns False, and then :meth:`values`. If the block is left before, the tasks are
    cancelled.

    Args:
        start: function that starts the tasks.
        channel: channel to the tasks; it is closed once they have ended.
        limits: times after which a rank counts as hanging.
        listener: receives log lines and events, on the thread that calls :meth:`poll`.
        watches_hangs: whether to look for ranks that hang; False if the caller does so for several launches together.

    Attributes:
        channel: the channel, with what the tasks have reported.
        stage: the tasks, once the block is entered.
    """

    stage: Stage

    def __init__(
        self,
        start: Callable[[], Stage],
        channel: DriverChannel,
        limits: HangLimits,
        listener: Listener,
        *,
        watches_hangs: bool = True,
    ) -> None:
        self._start, self.channel, self._limits, self._listener = start, channel, limits, listener
        self._watch = HangWatch(limits if watches_hangs else _NO_LIMITS)
        self._hang: Hang | None = None
        self._end_by = math.inf
        self._has_failed = False
        self._stack = ExitStack()
        self._has_left = False

    def __enter__(self) -> Supervision:
        with ExitStack() as stack:
            stack.enter_context(self.channel)
            self.stage = self._start()
            self.stage.call_at_end(self.channel.wake)
            self._stack = stack.pop_all()
        return self

    def poll(self, timeout_s: float) -> bool:
        """Pass on messages of the ranks, waiting at most that long for the first, and look for hangs.

        Returns:
            Whether the tasks still run, and do not have to be ended.

        Raises:
            SlotsMissingError: if the cluster did not have the slots in time.
        """
        if not self.stage.running or self.stage.error is not None or time.monotonic() >= self._end_by:
            return False
        for _ in range(_MOST_MESSAGES):
            message = self.channel.next_message(timeout_s)
            if message is None:
                break
            self._listener.handle(message)
            timeout_s = 0.0
        self._listener.show_due()
        self._look_for_hang()
        self.stage.check_start(len(self.channel.started))
        return True

    def cancel(self, reason: StopReason) -> None:
        """Have all ranks ended for this reason; they end while :meth:`poll` is called, or when the block is left."""
        self.channel.cancel(reason)
        if not self.channel.started:
            self.stage.cancel(timeout_s=0.0)  # so that Spark does not start it any more

    def values(self) -> list[Any]:
        """Return the values of the ranks, in order of rank, once :meth:`poll` has returned False.

        Raises:
            LaunchError: if the ranks could not be started.
            RankError: if a rank failed; ``__cause__`` is its exception.
            HangError: if a rank hung.
        """
        self._pass_on_last_lines()
        self._raise_hang()
        if self.stage.running:
            # A rank or its task failed, and another task does not end: what was received suffices.
            self.channel.cancel(StopReason("a rank failed, and not all tasks ended in time"))
            self.stage.cancel(timeout_s=CANCEL_TIMEOUT_S)
            self._leave()
        return collect(self.stage, self.channel.failures, self._listener.log, self._limits)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.stage.running and not self._has_left:
                why = "it is no longer needed" if kind is None else f"the driver cancelled: {kind.__name__}"
                self.channel.cancel(StopReason(why))
                self.stage.cancel(timeout_s=CANCEL_TIMEOUT_S)
        finally:
            self._listener.show_due(is_end=True)
            self._leave()
            self.stage.close()

    def _leave(self) -> None:
        """Close the channel; if tasks still run, continue to cancel them, and close it once they have ended."""
        self._has_left = True
        stack, self._stack = self._stack, ExitStack()
        with stack:
            if self.stage.running:
                _logger.warning(
                    "The tasks of this launch have not ended although they were cancelled. They are cancelled again "
                    "until they have, and ranks that start until then end without running the function."
                )
                self.channel.takes_messages = False
                cancel_in_background(self.stage, stack.pop_all().close)

    def _look_for_hang(self) -> None:
        """Have all ranks ended if one hangs, and limit the time that they may take; also after a failure."""
        if self._hang is not None:
            return
        if not self._has_failed and _are_explained(self.channel.failures):
            self._has_failed = True
            self._end_by = time.monotonic() + END_AFTER_FAILURE_TIMEOUT_S
        now = time.monotonic()
        self._hang = self._watch.observe(now, self.channel.health)
        if self._hang is not None:
            self._end_by = min(self._end_by, now + END_TIMEOUT_S)
            self.channel.cancel(StopReason(self._hang.why, is_hang=True))

    def _raise_hang(self) -> None:
        """Raise the error of a rank that hung, if one did and no code on a rank raised; log the stacks of all ranks."""
        failures = self.channel.failures
        if self._hang is not None and not _are_explained(failures):
            raise hang_error(self._hang, failures, self.channel.hosts)

    def _pass_on_last_lines(self) -> None:
        """Pass on the last lines of ranks, which may still be on their way when their tasks have ended."""
        is_running = self.stage.running
        timeout_s = 0.0 if is_running else LAST_LINES_TIMEOUT_S
        deadline, last_of_running = Deadline(timeout_s), Deadline(LAST_LINES_TIMEOUT_S)
        while not (is_running and last_of_running.expired):
            is_complete = self.channel.wait_until_disconnected(0.0)
            message = self.channel.next_message(0.0 if is_complete else deadline.at_most(0.1).timeout_s)
            if message is not None:
                self._listener.handle(message)
                deadline = Deadline(timeout_s)
            elif is_complete or deadline.expired:
                return


def _are_explained(failures: Sequence[Failure]) -> bool:
    """Whether code on a rank raised, which explains why the others end or wait."""
    return any(not failure.is_consequence and not failure.is_loss for failure in failures)


RESULTS_BYTES = 64 << 20
"""Results up to this size are assembled in memory, larger ones in a temporary file."""


def _load_value(rank: int, file: IO[bytes]) -> Any:
    what = f"The value that rank {rank} returned cannot be loaded on the driver"
    remedy = "Install there what its classes need, or return numbers, arrays and tensors on the CPU."
    with errors_as(SerializationError, what, remedy):
        return pickle.load(file)  # noqa: S301 - the bytes came through Spark's own channels, or from our process


def collect(
    stage: Stage,
    received: list[Failure],
    on_log: Callable[[int, str], None],
    limits: HangLimits,
) -> list[Any]:
    """Fetch the values of all ranks, in order of rank.

    Args:
        stage: tasks that have ended, or were cancelled.
        received: failures that the driver received while the tasks ran.
        on_log: called with rank and line for each line that could not reach the driver before.
        limits: times after which a rank counts as hanging.

    Raises:
        LaunchError: if the ranks could not be started, or Spark ended their stage; see
            :func:`~sparkdl.spark.failures.explain_job`.
        RankError: if a rank failed; ``__cause__`` is the rank's exception, with the causes of that exception.
        HangError: if the tasks found that a rank hangs.
        SerializationError: if the value of a rank cannot be loaded.
    """

    def fetch(kind: str, rank: int, load: Callable[[IO[bytes]], Any] = lambda file: file.read()) -> Any:
        with tempfile.SpooledTemporaryFile(max_size=RESULTS_BYTES) as file:
            stage.fetch(rank, kind, num_chunks.get((kind, rank), 0), file)
            file.seek(0)
            return load(file)

    try:
        num_chunks = {(kind, rank): number for rank, kind, number in stage.outcomes()}
        ranks_with = {
            kind: sorted(rank for other, rank in num_chunks if other == kind)
            for kind in ("log", "refused", "result", "failure")
        }
        for rank in ranks_with["log"]:
            for line in fetch("log", rank).decode("utf-8", "replace").splitlines():
                on_log(rank, line)
        for rank in ranks_with["refused"]:
            reason = fetch("refused", rank).decode()
            raise LaunchError(
                f"Driver and executors do not match: {reason}. Install the same versions on both."
            )
        returned = ranks_with["result"]
        missing = sorted(set(range(stage.num_ranks)) - set(returned))
        if not missing:  # the rows came through Spark's own authenticated channels, or from our process
            return [fetch("result", rank, partial(_load_value, rank)) for rank in returned]
        failures = received + [
            Failure.from_json(fetch("failure", rank), pickled=fetch("error", rank))
            for rank in ranks_with["failure"]
        ]
        raise_for_failures(failures, stage.error, stage, limits, returned)
        raise ExecutorsLostError(
            f"Ranks {missing} were lost with their executors. Look at the executors' logs, then run again."
        )
    except SparkdlError:
        raise
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc"):
            raise_for_failures(received, error, stage, limits)
        raise
