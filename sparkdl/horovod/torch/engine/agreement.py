"""Runs requests in an order on which the ranks agree without being asked.

Every rank runs its oldest request, under a name that says all that the ranks must agree on. Where they do agree,
which is nearly always, that is all. Where they do not, the communicator tells all of them so and has done nothing;
they then exchange lists of what they have, and run what all of them have in the order of the first rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.collective import Communicator, Deadline
from sparkdl.collective.stalls import numbered
from sparkdl.collective.waits import NotedWait
from sparkdl.errors import CommunicatorTimeoutError, MismatchError
from sparkdl.horovod.torch.engine.ages import Ages
from sparkdl.horovod.torch.engine.clashes import find_clashes
from sparkdl.horovod.torch.engine.description import Description, Kind
from sparkdl.horovod.torch.engine.exchange import exchange_reports
from sparkdl.horovod.torch.engine.outstanding import Outstanding
from sparkdl.horovod.torch.engine.plan import Step, missing_ranks, plan_steps
from sparkdl.horovod.torch.engine.report import Report
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.engine.stalls import ADVICE, StallWatch, find_stall
from sparkdl.horovod.torch.exceptions import HorovodInternalError

_PAUSE_S = 0.001
"""Between two looks at what the ranks have, when nothing can run."""

_GRACE_S = 2.0
"""For other threads to make the requests that would end a clash."""


class Agreement:
    """What this rank does so that all ranks run the same; by one thread at a time.

    Attributes:
        ended_alike: whether all ranks have raised the same, by themselves, so that none has to be told.
    """

    def __init__(
        self,
        communicator: Communicator,
        outstanding: Outstanding,
        make_stand_in: Callable[[Description], Request[Any]],
    ) -> None:
        """Begin.

        Args:
            communicator: of the process set.
            outstanding: what there is to run.
            make_stand_in: makes what a rank that has asked to join runs when the others run a request.
        """
        self._communicator = communicator
        self._outstanding = outstanding
        self._make_stand_in = make_stand_in
        self.ended_alike = False
        self._process_set = numbered(communicator.name, communicator.world_ranks)
        check = communicator.stall_check
        self._stalls = StallWatch(
            self._process_set, warn_after_s=check.warn_after_s, abort_after_s=check.abort_after_s
        )
        self._clashes = Ages()

    def run_oldest(self) -> bool:
        """Run the oldest request, or what all ranks have; False if there is none.

        Raises:
            CommunicatorError: if the ranks cannot be known to be in step any more.
        """
        request = self._outstanding.oldest()
        if request is None:
            return False
        try:
            request.match(self._communicator)
        except MismatchError:
            self._run_what_all_have()
        else:
            self._complete(request)
        return True

    def _run_what_all_have(self) -> None:
        """Wait until there is something that all ranks have."""
        communicator = self._communicator
        what = "requests of which none was made by all ranks"
        with NotedWait(communicator.name, communicator.world_ranks, what, communicator.timeout_s):
            steps = self._steps_of_all()
        for step in steps:
            self._take(step)

    def _steps_of_all(self) -> Sequence[Step]:
        deadline = Deadline(self._communicator.timeout_s)
        self._clashes.note([])
        while True:
            reports = exchange_reports(self._communicator, self._report)
            lists = [None if report is None else report.requests for report in reports]
            missing = missing_ranks(lists)
            self._stalls.note(missing)
            self._give_up_stalled(reports, missing)
            steps = plan_steps(lists) or self._steps_of_clash(reports)
            if steps:
                return steps
            if deadline.expired:
                waiting = "; ".join(f"{name} for ranks {ranks}" for name, ranks in missing.items())
                raise CommunicatorTimeoutError(
                    f"No request was made by all ranks for {deadline.timeout_s:g} s: {waiting} still to come. {ADVICE}"
                )
            time.sleep(_PAUSE_S)

    def _report(self) -> Report:
        requests = self._outstanding.requests()
        return Report(
            requests=tuple(request.description for request in requests),
            awaited=frozenset(request.description.name for request in requests if request.blocks_caller),
            stalled=self._stalls.stalled(),
            clashing=frozenset(self._clashes.older_than(_GRACE_S)),
        )

    def _give_up_stalled(
        self, reports: Sequence[Report | None], missing: Mapping[str, Sequence[int]]
    ) -> None:
        stall = find_stall(self._process_set, reports, missing)
        if stall is not None:
            self.ended_alike = None not in reports  # who has joined has seen no reports
            raise CommunicatorTimeoutError(stall)

    def _steps_of_clash(self, reports: Sequence[Report | None]) -> Sequence[Step]:
        """Fail what waits under one name for different operations, once some rank has seen it for long."""
        clashes = find_clashes(reports)
        self._clashes.note(clashes)
        ripe = {name for report in reports if report is not None for name in report.clashing}
        return next((steps for name, steps in clashes.items() if name in ripe), ())

    def _take(self, step: Step) -> None:
        self._stalls.note_run(step.description.name)
        request = self._outstanding.find(step.description.name)
        if step.error is not None:
            if request is not None:
                self._outstanding.finish(request, HorovodInternalError(step.error))
            return
        if request is None:  # this rank has asked to join
            stand_in = self._make_stand_in(step.description)
            stand_in.match(self._communicator)
            stand_in.complete(self._communicator)
            return
        request.match(self._communicator)
        self._complete(request)

    def _complete(self, request: Request[Any]) -> None:
        if request.description.kind is Kind.JOIN:
            self._stalls.note({})  # it has not heard of what the others ran meanwhile
        self._stalls.note_run(request.description.name)
        try:
            request.complete(self._communicator)
        except HorovodInternalError as error:
            self._outstanding.finish(request, error)
        else:
            self._outstanding.finish(request)
