"""The meeting of a launch's tasks before any rank begins, and the board on which they later post the first failure.

In the meeting every task gets the data of all others. The tasks meet through the driver, which answers within
milliseconds. If a task cannot reach the driver, all tasks meet through Spark's ``allGather``, which polls once a
second. The driver decides this for all tasks: a task calls ``allGather`` if it cannot reach the driver, or if the
driver says that another task cannot.

The two ways are not combined: if Spark kills a task in ``allGather``, as it does when another task of the stage is
lost, the whole executor exits. Spark raises ``TaskKilledException`` there in a thread that does not catch it (exit
status 50; seen with Spark 4.3).

After the meeting, the tasks post the first failure of the job to the :class:`FailureBoard` and read it there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError, LaunchError
from sparkdl.launch.wire.outcome import Failure, OnStop, StopReason
from sparkdl.rendezvous.deadline import Deadline

if TYPE_CHECKING:
    from sparkdl.launch.wire.channel import DriverLink
    from sparkdl.rendezvous.store import Rendezvous


_END_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The data of a task for the other tasks.

    Attributes:
        host: name of the task's host.
        conflicts: descriptions of versions that are not compatible with the driver's.
        mark: name of the task's mark, which other tasks see if they share its loopback.
        coordinator: address of the coordinator as text, from rank 0's task; empty from all other tasks.
    """

    host: str
    conflicts: list[str]
    mark: str
    coordinator: str


class Meeting(AbstractContextManager["Meeting"]):
    """The exchange of the tasks' data; a context manager that waits at its end for a running ``all_gather``.

    Args:
        all_gather: ``allGather`` of Spark's barrier, or what stands for it in another kind of task.
        link: connection to the driver.
        mine: data of this task.
    """

    def __init__(self, all_gather: Callable[[str], list[str]], link: DriverLink, mine: Peer) -> None:
        self._all_gather = all_gather
        self._peers: Future[list[Peer]] = Future()
        self._thread = threading.Thread(
            target=self._gather, args=(mine,), name="sparkdl-meeting", daemon=True
        )
        self._lock = threading.Lock()
        self._is_by_spark = False
        link.meet(asdict(mine), self._on_answer)

    def peers(self, timeout_s: float) -> list[Peer]:
        """Wait for the data of all tasks, in order of rank. Spark starts all tasks of a barrier stage at once.

        Raises:
            LaunchError: if the driver cancels or is gone, or if a task does not take part in time.
        """
        try:
            return self._peers.result(timeout_s)
        except FutureTimeoutError:
            raise LaunchError(
                f"the tasks did not meet within {timeout_s:g} s: one of them has not started its function, as when its "
                "Python worker waits for a disk. Look at the executors' logs."
            ) from None

    def meet_again(self, mine: Peer) -> list[Peer]:
        """Exchange the data of all tasks again, through Spark alone; every task has to make this call.

        Raises:
            LaunchError: if Spark has not ended the first meeting in time.
        """
        if self._is_by_spark:  # the first allGather may still run if the driver's answer was faster
            self._thread.join(_END_TIMEOUT_S)
        if self._thread.is_alive():
            raise LaunchError(f"allGather of Spark did not return within {_END_TIMEOUT_S:g} s")
        gathered = self._all_gather(json.dumps(asdict(mine)))
        return [Peer(**json.loads(text)) for text in gathered]

    def abandon(self, reason: str) -> None:
        """Stop waiting for the other tasks. Safe from any thread; does nothing if all tasks have met."""
        self._fail(LaunchError(f"the tasks did not meet: {reason}"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            gathers, self._is_by_spark = self._is_by_spark, True  # from now on no allGather begins
        if error is None and gathers:
            # A task that ends during allGather would fail the others.
            self._thread.join(_END_TIMEOUT_S)

    def _on_answer(self, peers: list[dict[str, Any]] | None) -> None:
        """Handle the driver's answer; None means that the tasks meet through Spark."""
        if peers is not None:
            self._set_peers(peers)
            return
        with self._lock:
            # The driver repeats this message for each task of a later attempt of the stage.
            if self._is_by_spark or self._peers.done():
                return
            self._is_by_spark = True
            self._thread.start()

    def _gather(self, mine: Peer) -> None:
        try:
            gathered = self._all_gather(json.dumps(asdict(mine)))
            self._set_peers([json.loads(text) for text in gathered])
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # the result is already there
            self._peers.set_exception(error)

    def _set_peers(self, peers: list[dict[str, Any]]) -> None:
        with suppress(InvalidStateError):  # the data came by the other way first, or the wait has failed
            self._peers.set_result([Peer(**peer) for peer in peers])


CAUSE_TIMEOUT_S = 3.0
"""How long the task of a rank that failed because of another rank waits for the other rank's task to post first."""

FINISH_TIMEOUT_S = 30.0
"""How long rank 0's task waits for the other tasks after a failure."""

_FAILURE = "failure"
_LOST = "lost"
_POLL_S = 60.0
_FINISH_POLL_S = 1.0


class FailureBoard:
    """The first failure of a job, kept under one key of the tasks' rendezvous.

    Args:
        rendezvous: rendezvous that the tasks share.
        rank: rank of this task.
        host: name of this task's host.
        is_alone: whether the job has no other task, so that the cause of a consequence is not posted here.
    """

    def __init__(self, rendezvous: Rendezvous, *, rank: int, host: str, is_alone: bool = False) -> None:
        self._rendezvous, self._is_alone = rendezvous, is_alone
        self._rank = rank
        self._failed = threading.Event()
        lost = Failure(
            rank=rank, host=host, error="its executor or Python worker was lost", traceback="", is_loss=True
        )
        rendezvous.post_if_lost(_LOST, lost.to_json())

    def post(self, failure: Failure, *, is_cancelled: bool = False) -> None:
        """Post ``failure`` unless the board has one already; a consequence first waits for its cause to be posted.

        Args:
            failure: failure of this task's rank.
            is_cancelled: whether the driver has cancelled the job, so that no other rank is the cause.
        """
        try:
            if failure.is_consequence and not (failure.is_hang or self._is_alone or is_cancelled):
                try:
                    self._rendezvous.get(_FAILURE, CAUSE_TIMEOUT_S)
                    return
                except CommunicatorTimeoutError:
                    pass
            self._rendezvous.compare_set(_FAILURE, b"", failure.to_json())
        except (OSError, CommunicatorError):
            pass  # the coordinator is gone, and with it the board

    def watch(self, on_failure: OnStop) -> None:
        """Call ``on_failure`` with the reason, from a thread, once a rank or a task has failed or the board is lost."""
        for key in (_FAILURE, f"{_LOST}/1"):
            threading.Thread(
                target=self._watch, args=(key, on_failure), name="sparkdl-failures", daemon=True
            ).start()

    def finish(self) -> None:
        """Report that this task does not need the coordinator any more."""
        try:
            self._rendezvous.set(f"finished/{self._rank}", b"")
        except (OSError, CommunicatorError):
            pass  # the coordinator is gone

    def wait_until_finished(self, world_size: int) -> None:
        """Wait until every task has called ``finish``: without limit, but only half a minute after a failure."""
        deadline: Deadline | None = None
        for rank in range(world_size):
            while True:
                try:
                    self._rendezvous.get(f"finished/{rank}", _FINISH_POLL_S)
                    break
                except CommunicatorTimeoutError:
                    if self._failed.is_set():
                        deadline = deadline or Deadline(FINISH_TIMEOUT_S)
                    if deadline is not None and deadline.expired:
                        return

    def _watch(self, key: str, on_failure: OnStop) -> None:
        while True:
            try:
                failure = Failure.from_json(self._rendezvous.get(key, _POLL_S))
            except CommunicatorTimeoutError:
                continue
            except (OSError, CommunicatorError):
                reason = StopReason("the coordinator in rank 0's task is gone")
            else:
                text = f"rank {failure.rank} on {failure.host} failed: {failure.error}"
                reason = StopReason(failure.error if failure.is_hang else text, is_hang=failure.is_hang)
            break
        self._failed.set()
        on_failure(reason)
