"""A run that the runs of several fits are nested in: those of a CrossValidator, or of several Param maps. *Driver*."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from sparkdl.tracking.fit_run import TrackingMode, is_tracking
from sparkdl.tracking.mlflow_run import MlflowRun
from sparkdl.tracking.run_start import choose_store
from sparkdl.tracking.switches import current_switches

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.tracking.kept_runs import Shelf

_WAIT_FOR_PARENT_S = 60.0
_WAIT_AT_END_S = 10.0


class RunGroup:
    """The user's run that was active where the group began, or else a run of its own, which ends with :meth:`close`.

    Attributes:
        active: the user's run.
        key: of the run of its own.
    """

    def __init__(
        self, shelf: Callable[[], Shelf], *, experiment: str | None, name: str, wait_s: float = _WAIT_AT_END_S
    ) -> None:
        import mlflow

        choose_store()
        self.active: Any = None if current_switches().exclusive else mlflow.active_run()
        self._run: MlflowRun | None = None
        if self.active is None:
            self._run = MlflowRun(
                shelf, experiment=experiment, run_name=name, tags={}, group=None, wait_s=wait_s
            )
        self.key = None if self._run is None else self._run.start.key
        self._has_failed = self._is_closed = False
        self._lock = threading.Lock()

    def parent_id(self) -> str:
        """Return the id of the run that others are nested in; called on the threads that send.

        Raises:
            TimeoutError: if the server has not told in time.
        """
        if self._run is None:
            return str(self.active.info.run_id)
        if not self._run.has_begun.wait(_WAIT_FOR_PARENT_S):
            raise TimeoutError("the run that this one is nested in could not be opened")
        assert self._run.run_id is not None
        return self._run.run_id

    def note_failure(self) -> None:
        """Have the run of its own end as failed."""
        self._has_failed = True

    def close(self) -> None:
        """End the run of its own; doing so again does nothing."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if self._run is not None and not was_closed:
            self._run.close("FAILED" if self._has_failed else "FINISHED")


def open_group(
    mode: TrackingMode, shelf: Callable[[], Shelf], *, experiment: str | None, name: str
) -> RunGroup | None:
    """Begin a group of runs; None without tracking.

    Raises:
        ParamError: for ``"on"`` when mlflow is not installed.
    """
    return RunGroup(shelf, experiment=experiment, name=name) if is_tracking(mode) else None
