"""The report and the timeline of a communicator. Runs on ranks."""

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
"""How long a rank that closes waits for the others, which need not close."""


class Observed:
    """The part of a :class:`~sparkdl.collective.communicator.Communicator` that can be observed.

    Attributes:
        monitor: of this communicator's operations.
        telemetry: the monitors of this communicator and of the process sets made of it.
        world_ranks: the ranks' numbers in the communicator that all others of the family were split from; reports and
            timelines name ranks by them.
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
        """The report of this rank about this communicator and the process sets made of it.

        Operations are always counted; no other rank is asked. :meth:`gather_report` returns the reports of all ranks.

        Args:
            reset: set the counts to zero afterwards.
        """
        return make_report(self.world_ranks[self.rank], *self.telemetry.measure(reset=reset))

    def gather_report(self) -> WorldReport | None:
        """On rank 0 the reports of all ranks and which ranks came last, elsewhere None. All ranks must call it."""
        with self._open_duplicate("report") as duplicate:
            return gather_world_report(self, duplicate)

    @property
    def has_timeline(self) -> bool:
        """A timeline was started on this communicator and runs."""
        return self._timeline is not None

    def start_timeline(
        self, path: str | os.PathLike[str], *, max_events: int = 65536, is_live: bool = False
    ) -> None:
        """Record the operations of this communicator and of the process sets made of it from now on.

        All ranks must call it. :meth:`stop_timeline`, or closing the communicator, writes one file for all ranks in the
        Trace Event Format, which https://ui.perfetto.dev opens.

        Args:
            path: the file, on rank 0's machine; replaced if it is there.
            max_events: how many operations of each communicator every rank keeps, the latest ones.
            is_live: whether rank 0 writes its own operations to the file many times a second while the timeline runs.

        Raises:
            ParamError: if a timeline runs already, or rank 0 cannot write the file.
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
            timeout_s: deadline of each step.

        Raises:
            ParamError: if no timeline runs, or rank 0 cannot write the file.
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
