"""How the tasks of a launch learn of each other before any rank begins. Runs in the barrier tasks.

By the driver, which answers within milliseconds; by Spark's ``allGather``, which looks for its answer once a second,
only where a task cannot reach the driver. The driver says which, so that all tasks take the same way: a task takes
part in ``allGather`` when it cannot reach the driver, or when the driver says that another one cannot.

Not both at once: a task that Spark kills while it is in ``allGather``, as it does when another task of the stage is
lost, takes its whole executor along. Spark raises ``TaskKilledException`` there in a thread that has nobody to catch
it, and an executor exits on that (with status 50; seen with Spark 4.3).
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkdl.errors import LaunchError

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

    from sparkdl.launch.driver_link import DriverLink

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
