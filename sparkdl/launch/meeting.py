"""How the tasks of a launch learn of each other before any rank begins. Runs in the barrier tasks.

Spark's ``allGather`` looks for its answer once a second. Where all tasks reach the driver it answers first, within
milliseconds; each task takes part in both, so that no two of them have to agree on the way.
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
    """Brings together what all tasks tell; a context manager, at whose end Spark has done its part, too."""

    def __init__(self, context: BarrierTaskContext, link: DriverLink, mine: Peer) -> None:
        self._context = context
        self._peers: Future[list[Peer]] = Future()
        self._thread = threading.Thread(
            target=self._gather, args=(context, mine), name="sparkdl-meeting", daemon=True
        )
        self._thread.start()
        link.meet(asdict(mine), self._settle)

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
        if error is None:
            # A task that ended in the midst of it would fail the others.
            self._thread.join(_END_TIMEOUT_S)

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
