"""How the tasks of a launch learn of each other before any rank begins, and later of the first failure.

The tasks meet through the driver, which answers within milliseconds. Where a task cannot reach the driver, they meet
by Spark's ``allGather``, which polls for its answer once a second. The driver decides which, so that all tasks take
the same way: a task takes part in ``allGather`` when it cannot reach the driver, or when the driver says that another
task cannot.

The two ways are not used at once: a task that Spark kills while it is in ``allGather``, as it does when another task
of the stage is lost, takes its whole executor along. Spark raises ``TaskKilledException`` there in a thread that does
not catch it, and the executor exits (with status 50; seen with Spark 4.3).

After the meeting, the tasks post the first failure of the job to the :class:`FailureBoard` and read it there.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkdl.collective import PrefixRendezvous
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, LaunchError
from sparkdl.launch.wire.outcome import Failure, OnStop, StopReason
from sparkdl.rendezvous.deadline import Deadline

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

    from sparkdl.launch.wire.channel import DriverLink


_END_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What every task tells the others.

    Attributes:
        host: its name.
        conflicts: versions that do not go with those of the driver.
        mark: the name of its mark, which the others see if they share its loopback.
        coordinator: address of the coordinator, as text; of rank 0's task alone.
    """

    host: str
    conflicts: list[str]
    mark: str
    coordinator: str


class Meeting:
    """Brings together what all tasks tell; a context manager, at whose end Spark has done its part, if it has one."""

    def __init__(self, context: BarrierTaskContext, link: DriverLink, mine: Peer) -> None:
        self._context = context
        self._peers: Future[list[Peer]] = Future()
        self._thread = threading.Thread(
            target=self._gather, args=(context, mine), name="sparkdl-meeting", daemon=True
        )
        self._lock = threading.Lock()
        self._is_by_spark = False
        link.meet(asdict(mine), self._hear)

    def peers(self, timeout_s: float) -> list[Peer]:
        """Wait for what all tasks told, by rank. Spark starts the tasks of a stage at once.

        Raises:
            LaunchError: if the driver cancels, or is gone, or a task does not come in time.
        """
        try:
            return self._peers.result(timeout_s)
        except FutureTimeoutError:
            raise LaunchError(
                f"the tasks did not meet within {timeout_s:g} s: one of them does not come to its start, as where its "
                "Python worker waits for a disk. Look at the executors' logs."
            ) from None

    def meet_again(self, mine: Peer) -> list[Peer]:
        """Have all tasks tell something anew, by Spark alone; each of them has to make this call.

        Raises:
            LaunchError: if Spark has not ended the first meeting in time.
        """
        if self._is_by_spark:  # it may be under way where the driver's answer was faster
            self._thread.join(_END_TIMEOUT_S)
        if self._thread.is_alive():
            raise LaunchError(f"Spark did not bring the tasks together within {_END_TIMEOUT_S:g} s")
        gathered = self._context.allGather(json.dumps(asdict(mine)))
        return [Peer(**json.loads(text)) for text in gathered]

    def abandon(self, reason: str) -> None:
        """Wait no longer. Safe from any thread; does nothing where all have met."""
        self._fail(LaunchError(f"the tasks did not meet: {reason}"))

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            gathers, self._is_by_spark = self._is_by_spark, True  # from now on it does not begin
        if error is None and gathers:
            # A task that ended in the midst of it would fail the others.
            self._thread.join(_END_TIMEOUT_S)

    def _hear(self, peers: list[dict[str, Any]] | None) -> None:
        """Take the driver's answer; None has the tasks meet by Spark."""
        if peers is not None:
            self._settle(peers)
            return
        with self._lock:
            # The driver says so again with each task of a later attempt of the stage.
            if self._is_by_spark or self._peers.done():
                return
            self._is_by_spark = True
            self._thread.start()

    def _gather(self, context: BarrierTaskContext, mine: Peer) -> None:
        try:
            gathered = context.allGather(json.dumps(asdict(mine)))
            self._settle([json.loads(text) for text in gathered])
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        try:
            self._peers.set_exception(error)
        except InvalidStateError:
            pass  # nobody waits for it any more

    def _settle(self, peers: list[dict[str, Any]]) -> None:
        try:
            self._peers.set_result([Peer(**peer) for peer in peers])
        except InvalidStateError:
            pass  # the other way was faster


CULPRIT_PATIENCE_S = 3.0
"""How long a rank that failed because of another one waits for that one's task to post first."""

FAREWELL_TIMEOUT_S = 30.0
"""How long rank 0's task waits for the others after a failure."""

_FAILURE = "failure"
_LOST = "lost"
_LOOK_AGAIN_S = 60.0
_FAREWELL_LOOK_AGAIN_S = 1.0


class FailureBoard:
    """The first failure of a job, kept under one key of the tasks' rendezvous.

    Args:
        rendezvous: shared by the tasks.
        rank: this task's rank.
        host: its host.
    """

    def __init__(self, rendezvous: PrefixRendezvous, *, rank: int, host: str) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._failed = threading.Event()
        lost = Failure(
            rank=rank, host=host, error="its executor or Python worker was lost", traceback="", is_loss=True
        )
        rendezvous.post_if_lost(_LOST, lost.to_json().encode())

    def post(self, failure: Failure) -> None:
        """Make ``failure`` known unless there is one already; a consequence first waits for its cause."""
        try:
            if failure.is_consequence and not failure.is_hang:
                try:
                    self._rendezvous.get(_FAILURE, CULPRIT_PATIENCE_S)
                    return
                except CommunicatorTimeoutError:
                    pass
            self._rendezvous.compare_set(_FAILURE, b"", failure.to_json().encode())
        except (OSError, CommunicatorError):
            pass  # the coordinator is gone, and with it everyone who could read the board

    def watch(self, on_failure: OnStop) -> None:
        """Call ``on_failure`` with the reason, from a thread, once a rank or a task has failed or the board is lost."""
        for key in (_FAILURE, f"{_LOST}/1"):
            threading.Thread(
                target=self._watch, args=(key, on_failure), name="sparkdl-failures", daemon=True
            ).start()

    def finish(self) -> None:
        """Say that this task needs the coordinator no longer."""
        try:
            self._rendezvous.set(f"finished/{self._rank}", b"")
        except (OSError, CommunicatorError):
            pass  # likewise

    def wait_until_finished(self, world_size: int) -> None:
        """Wait for every task's ``finish``: as long as they work, and half a minute once one of them has failed."""
        deadline: Deadline | None = None
        for rank in range(world_size):
            while True:
                try:
                    self._rendezvous.get(f"finished/{rank}", _FAREWELL_LOOK_AGAIN_S)
                    break
                except CommunicatorTimeoutError:
                    if self._failed.is_set():
                        deadline = deadline or Deadline(FAREWELL_TIMEOUT_S)
                    if deadline is not None and deadline.expired:
                        return

    def _watch(self, key: str, on_failure: OnStop) -> None:
        while True:
            try:
                failure = Failure.from_json(self._rendezvous.get(key, _LOOK_AGAIN_S))
            except CommunicatorTimeoutError:
                continue
            except (OSError, CommunicatorError):
                reason = StopReason("the coordinator in rank 0's task is gone")
            else:
                said = f"rank {failure.rank} on {failure.host} failed: {failure.error}"
                reason = StopReason(failure.error if failure.is_hang else said, is_hang=failure.is_hang)
            break
        self._failed.set()
        on_failure(reason)
