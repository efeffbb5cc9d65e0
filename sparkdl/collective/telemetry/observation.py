"""The report and the timeline of a communicator."""

from __future__ import annotations

import logging
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.collective.telemetry.monitor import OperationMonitor
from sparkdl.collective.telemetry.report import (
    CommunicationReport,
    WorldReport,
    gather_world_report,
    make_report,
)
from sparkdl.collective.telemetry.timeline import Timeline
from sparkdl.errors import ParamError, SparkdlError

if TYPE_CHECKING:
    import os

    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.telemetry.monitor import Monitor, Telemetry

logger = logging.getLogger(__name__)

_LAST_TIMELINE_S = 10.0
"""How long a closing rank waits for the other ranks, which may not be closing."""


class Observed:
    """The part of a :class:`~sparkdl.collective.communicator.Communicator` that can be observed.

    Attributes:
        monitor: monitor of this communicator's operations.
        telemetry: the monitors of this communicator and of its process sets.
        world_ranks: world rank of each rank, its number in the communicator from which all others of the family were
            split. Reports and timelines use these numbers.
    """

    name: str

    def __init__(self, telemetry: Telemetry, world_ranks: tuple[int, ...]) -> None:
        self.monitor: Monitor = OperationMonitor()
        self.telemetry = telemetry
        self.world_ranks = world_ranks
        self._timeline: Timeline | None = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this rank in the communicator."""

    @abstractmethod
    def _open_duplicate(self, name: str) -> Communicator:
        """Open a communicator of the same ranks that is not observed; collective."""

    def report(self, *, reset: bool = False) -> CommunicationReport:
        """Return the report of this rank on this communicator and its process sets.

        Operations are always counted; the report needs no communication. :meth:`gather_report` returns the reports of
        all ranks.

        Args:
            reset: whether to set the counts to zero afterwards.
        """
        return make_report(self.world_ranks[self.rank], *self.telemetry.measure(reset=reset))

    def gather_report(self) -> WorldReport | None:
        """Return the reports of all ranks on rank 0, with the ranks that came last; None elsewhere. Collective."""
        with self._open_duplicate("report") as duplicate:
            return gather_world_report(self, duplicate)

    @property
    def has_timeline(self) -> bool:
        """Whether a timeline that was started on this communicator is running."""
        return self._timeline is not None

    def start_timeline(
        self, path: str | os.PathLike[str], *, max_events: int = 65536, is_live: bool = False
    ) -> None:
        """Begin to record the operations of this communicator and of its process sets.

        All ranks must call it. :meth:`stop_timeline`, or closing the communicator, writes one file for all ranks in the
        Trace Event Format, which https://ui.perfetto.dev opens.

        Args:
            path: path of the file, on rank 0's machine; an existing file is replaced.
            max_events: number of operations that every rank keeps for each communicator, the latest ones.
            is_live: whether rank 0 writes its own operations to the file many times a second while the timeline runs.

        Raises:
            ParamError: if a timeline is already running, or rank 0 cannot write the file.
        """
        if self._timeline is not None:
            raise ParamError(f"a timeline of {self.name!r} runs already; stop it first")
        if max_events < 1:
            raise ParamError(f"max_events must be positive, got {max_events}")
        duplicate = self._open_duplicate("timeline")
        try:
            self._timeline = Timeline(
                duplicate, self.telemetry, Path(path), max_events=max_events, is_live=is_live
            )
        except BaseException:
            duplicate.close()
            raise

    def stop_timeline(self, *, timeout_s: float | None = None) -> None:
        """End the timeline and write its file. All ranks must call it.

        If ranks were lost meanwhile, the file has the records of the others, and a warning is logged.

        Args:
            timeout_s: seconds for each step; the communicator's deadline when None.

        Raises:
            ParamError: if no timeline is running, or rank 0 cannot write the file.
        """
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            raise ParamError(f"no timeline of {self.name!r} runs; start one first")
        timeline.stop(timeout_s=timeout_s)

    def _end_timeline(self) -> None:
        """End a running timeline; transports call this first when they close."""
        if self._timeline is None:
            return
        try:
            self.stop_timeline(timeout_s=_LAST_TIMELINE_S)
        except SparkdlError as error:
            logger.warning("The timeline that was running could not be written: %s", error)
