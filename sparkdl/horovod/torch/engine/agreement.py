"""Runs requests in an order on which the ranks agree without a negotiation.

Every rank runs its oldest request, under a name that contains everything that the ranks must agree on. Nearly always
the names are the same, and no further step is needed. If they differ, the communicator runs nothing and reports the
mismatch to all ranks; the ranks then exchange lists of their outstanding requests, and run those that all of them
have, in the order of the first rank.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparkdl.collective import Communicator, Deadline
from sparkdl.collective.telemetry.stalls import NotedWait, describe_communicator
from sparkdl.errors import CommunicatorTimeoutError, MismatchError
from sparkdl.horovod.torch.engine.plan import (
    RequestReport,
    Step,
    find_clashes,
    missing_ranks,
    parse_report,
    plan_steps,
)
from sparkdl.horovod.torch.engine.request import Description, Kind, Request
from sparkdl.horovod.torch.engine.stalls import REMEDY, Ages, StallWatch, find_stall
from sparkdl.horovod.torch.names import HorovodInternalError


def exchange_reports(
    communicator: Communicator, report: Callable[[], RequestReport]
) -> list[RequestReport | None]:
    """Gather the reports of all ranks; None for a rank that has joined.

    A rank may call this while other ranks run an operation. That operation then fails as a mismatch on all ranks, and
    those ranks exchange reports, too.

    Args:
        communicator: communicator of the process set; a rank that has joined contributes zeros instead of a report.
        report: function that returns the report of this rank.
    """
    while True:
        sent = report().text.encode()
        sizes = np.zeros(communicator.world_size, np.int64)
        try:
            communicator.allgather(np.array([len(sent)]), sizes, name="sizes of the lists of requests")
            break
        except MismatchError:
            continue
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(sent)] = np.frombuffer(sent, np.uint8)
    received = np.zeros((communicator.world_size, padded.size), np.uint8)
    communicator.allgather(padded, received, name="lists of requests")
    return [
        parse_report(row[:size].tobytes().decode()) if size else None
        for row, size in zip(received, sizes.tolist(), strict=True)
    ]


_DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


class Outstanding:
    """Requests by name, in the order of submission. Thread-safe."""

    def __init__(self, completed: threading.Condition) -> None:
        """Start without requests.

        Args:
            completed: condition that is notified when a request that a thread sleeps for is done; its lock guards the
                requests.
        """
        self._completed = completed
        self._requests: dict[str, Request[Any]] = {}
        self._numbers: Counter[str] = Counter()
        self._failure: HorovodInternalError | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def next_number(self, prefix: str) -> int:
        """Return the next number for requests without a name, which are thus matched in the order of submission."""
        with self._completed:
            self._numbers[prefix] += 1
            return self._numbers[prefix]

    def add(self, request: Request[Any]) -> None:
        """Append a request.

        Raises:
            ValueError: if a request of this name is outstanding.
            HorovodInternalError: if requests are no longer accepted.
        """
        with self._completed:
            if self._failure is not None:
                raise HorovodInternalError(str(self._failure)) from self._failure
            if request.description.name in self._requests:
                raise ValueError(_DUPLICATE_NAME)
            self._requests[request.description.name] = request

    def refuse_more(self, failure: HorovodInternalError) -> None:
        """Accept no more requests, because of ``failure`` or of an earlier one."""
        with self._completed:
            self._failure = self._failure or failure

    def oldest(self) -> Request[Any] | None:
        """The oldest request; None if there is none."""
        with self._completed:
            return next(iter(self._requests.values()), None)

    def find(self, name: str) -> Request[Any] | None:
        """The request of this name; None if there is none."""
        with self._completed:
            return self._requests.get(name)

    def requests(self) -> list[Request[Any]]:
        """All requests, in the order of submission."""
        with self._completed:
            return list(self._requests.values())

    def finish(self, request: Request[Any], error: BaseException | None = None) -> None:
        """Remove a request that is done or, with ``error``, has failed."""
        with self._completed:
            del self._requests[request.description.name]
            if request.description.kind is Kind.JOIN:
                # Ranks that had joined have not counted the requests that the others ran without them.
                self._numbers.clear()
            request.error = error
            request.done = True
            if request.is_awaited:
                self._completed.notify_all()

    def fail(self, failure: HorovodInternalError) -> None:
        """Fail all requests, and accept no more."""
        self.refuse_more(failure)
        while (request := self.oldest()) is not None:
            self.finish(request, failure)


_PAUSE_S = 0.001
"""Pause between two exchanges of reports, if no request can run."""

_GRACE_S = 2.0
"""Time for other threads to make the requests that would end a clash."""


class Agreement:
    """Runs requests so that all ranks run the same ones; used by one thread at a time.

    Attributes:
        ended_alike: whether all ranks have raised the same error by themselves, so that none has to be notified.
    """

    def __init__(
        self,
        communicator: Communicator,
        outstanding: Outstanding,
        make_stand_in: Callable[[Description], Request[Any]],
    ) -> None:
        """Start watching for stalls.

        Args:
            communicator: communicator of the process set.
            outstanding: requests to run.
            make_stand_in: function that makes the request that a rank which has asked to join runs in place of a
                request of the other ranks.
        """
        self._communicator = communicator
        self._outstanding = outstanding
        self._make_stand_in = make_stand_in
        self.ended_alike = False
        self._process_set = describe_communicator(communicator.name, communicator.world_ranks)
        check = communicator.stall_check
        self._stalls = StallWatch(
            self._process_set, warn_after_s=check.warn_after_s, abort_after_s=check.abort_after_s
        )
        self._clashes = Ages()

    def run_oldest(self) -> bool:
        """Run the oldest request; if the ranks differ in it, wait for requests that all ranks have made, and run those.

        Returns:
            False if this rank has no request, else True.

        Raises:
            CommunicatorError: if the ranks may no longer be at the same request.
        """
        request = self._outstanding.oldest()
        if request is None:
            return False
        request.look_ahead(self._outstanding.requests)
        try:
            request.match(self._communicator)
        except MismatchError:
            self._run_what_all_have()
        else:
            self._complete(request)
        return True

    def _run_what_all_have(self) -> None:
        """Wait for requests that all ranks have, and run them."""
        communicator = self._communicator
        what = "different requests, none of them made by all ranks"
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
                    f"No request was made by all ranks for {deadline.timeout_s:g} s: {waiting} still to come. {REMEDY}"
                )
            time.sleep(_PAUSE_S)

    def _report(self) -> RequestReport:
        requests = self._outstanding.requests()
        return RequestReport(
            requests=tuple(request.description for request in requests),
            awaited=frozenset(request.description.name for request in requests if request.blocks_caller),
            stalled=self._stalls.find_stalled(),
            clashing=frozenset(self._clashes.older_than(_GRACE_S)),
        )

    def _give_up_stalled(
        self, reports: Sequence[RequestReport | None], missing: Mapping[str, Sequence[int]]
    ) -> None:
        stall = find_stall(self._process_set, reports, missing)
        if stall is not None:
            self.ended_alike = None not in reports  # a rank that has joined has seen no reports
            raise CommunicatorTimeoutError(stall)

    def _steps_of_clash(self, reports: Sequence[RequestReport | None]) -> Sequence[Step]:
        """Steps that fail the requests that clash under one name, once a rank has seen the clash for ``_GRACE_S``."""
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
        request.look_ahead(lambda: ())
        request.match(self._communicator)
        self._complete(request)

    def _complete(self, request: Request[Any]) -> None:
        if request.description.kind is Kind.JOIN:
            self._stalls.note({})  # this rank does not know what the others ran meanwhile
        together = [request, *request.fused]
        for member in together:
            self._stalls.note_run(member.description.name)
        failure = None
        try:
            request.complete(self._communicator)
        except HorovodInternalError as error:
            failure = error
        for member in together:
            self._outstanding.finish(member, failure)
