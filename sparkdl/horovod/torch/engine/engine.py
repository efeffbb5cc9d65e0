"""Runs the requests of one process set, in an order on which its ranks agree without being asked.

Every rank runs its oldest request, under a name that says all that the ranks must agree on. Where they do agree,
which is nearly always, that is all. Where they do not, the communicator tells all of them so and has done nothing;
they then exchange lists of what they have, and run what all of them have in the order of the first rank.

Whoever waits for a request runs the engine meanwhile, so that an operation which somebody waits for does not pass
from thread to thread. What nobody waits for is run by a thread of the engine's own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sparkdl.collective import Communicator, Deadline
from sparkdl.errors import CommunicatorTimeoutError, MismatchError
from sparkdl.horovod.torch.engine.description import Description, Kind
from sparkdl.horovod.torch.engine.exchange import exchange_outstanding
from sparkdl.horovod.torch.engine.plan import Step, missing_ranks, plan_steps
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.engine.stalls import StallWatch
from sparkdl.horovod.torch.exceptions import HorovodInternalError

# How long the engine's thread leaves new requests to whoever may come to wait for them; Horovod's cycle time.
_CYCLE_S = 0.001
_GRACE_S = 1.0

_CYCLE_MARK = "CYCLE_START"
"""What Horovod calls the beginning of a cycle in a timeline."""

_DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)
_SHUT_DOWN = "Horovod has been shut down."


class Engine:
    """The requests of one process set on this rank, and the communicator that they run on.

    Attributes:
        communicator: of the process set; the engine's own, which it closes.
        marks_cycles: whether a timeline shows where the engine begins to run requests.
    """

    def __init__(
        self, communicator: Communicator, make_stand_in: Callable[[Description], Request[Any]]
    ) -> None:
        """Begin to serve.

        Args:
            communicator: of the process set; taken over.
            make_stand_in: makes what a rank that has asked to join runs when the others run a request.
        """
        self.communicator = communicator
        self.marks_cycles = False
        self._make_stand_in = make_stand_in
        self._stalls = StallWatch(communicator.name, communicator.stall_check.warn_after_s)
        self._outstanding: dict[str, Request[Any]] = {}
        self._numbers: Counter[str] = Counter()
        self._failure: HorovodInternalError | None = None
        self._num_waiting = 0
        self._is_driven = False
        lock = threading.Lock()
        self._submitted = threading.Condition(lock)
        """Tells the engine's thread that there may be something to run."""
        self._completed = threading.Condition(lock)
        """Tells those who wait that something is done, or that nobody drives the engine."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"horovod {communicator.name}", daemon=True)
        self._thread.start()

    def next_number(self, prefix: str) -> int:
        """Count the requests without a name, so that they are matched in the order of submission."""
        with self._submitted:
            self._numbers[prefix] += 1
            return self._numbers[prefix]

    def submit(self, request: Request[Any], *, will_wait: bool = False) -> None:
        """Take a request, to be run after those that are here.

        Args:
            request: what to run.
            will_wait: whether the caller will call :meth:`wait` for it at once.

        Raises:
            ValueError: if a request of this name is outstanding.
            HorovodInternalError: if the engine has failed or is closed.
        """
        with self._submitted:
            if self._failure is not None:
                raise HorovodInternalError(str(self._failure)) from self._failure
            if request.description.name in self._outstanding:
                raise ValueError(_DUPLICATE_NAME)
            self._outstanding[request.description.name] = request
            if not will_wait and not self._is_driven:
                self._submitted.notify()

    def wait(self, request: Request[Any]) -> None:
        """Run what is outstanding until ``request`` is done, or let another thread do it.

        Raises:
            HorovodInternalError: if the request failed.
        """
        while self._take_turn(request):
            try:
                self._drive(lambda: request.done)
            finally:
                self._leave()
        if request.error is not None:
            raise HorovodInternalError(str(request.error)) from (request.error.__cause__ or request.error)

    def close(self) -> None:
        """Fail what is outstanding, here and on the other ranks, and close the communicator."""
        with self._submitted:
            outstanding = list(self._outstanding)
            if self._failure is None:
                self._failure = HorovodInternalError(_SHUT_DOWN)
            self._closing.set()
            self._submitted.notify()
            # What all ranks have asked for is about to end by itself.
            is_free = self._completed.wait_for(lambda: not self._is_driven, _GRACE_S)
        if not is_free:
            self.communicator.abort(
                f"rank {self.communicator.rank} shut Horovod down while it had {', '.join(outstanding)}"
            )
        with self._completed:
            self._completed.wait_for(lambda: not self._is_driven)
            self._is_driven = True
        self._fail_outstanding(self._failure)
        self.communicator.close()
        self._leave()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with self._submitted:
                self._submitted.wait_for(self._can_begin)
            self._closing.wait(_CYCLE_S)
            with self._submitted:
                if self._closing.is_set() or self._num_waiting or not self._can_begin():
                    continue
                self._is_driven = True
            self._drive(lambda: self._num_waiting > 0)
            self._leave()

    def _can_begin(self) -> bool:
        return self._closing.is_set() or (bool(self._outstanding) and not self._is_driven)

    def _take_turn(self, request: Request[Any]) -> bool:
        """Wait until this thread may drive the engine; False if ``request`` is done first."""
        with self._completed:
            while not request.done and self._is_driven:
                request.is_awaited = True
                self._num_waiting += 1
                try:
                    self._completed.wait()
                finally:
                    self._num_waiting -= 1
            if request.done:
                return False
            self._is_driven = True
            return True

    def _leave(self) -> None:
        """Have what is left run by whoever waits for some of it, or else by the engine's thread."""
        with self._submitted:
            self._is_driven = False
            self._completed.notify_all()
            if self._outstanding:
                self._submitted.notify()

    def _drive(self, is_over: Callable[[], bool]) -> None:
        """Run requests, as long as there are any, until ``is_over``."""
        if self.marks_cycles:
            self.communicator.telemetry.mark(self.communicator.name, _CYCLE_MARK)
        try:
            while not is_over() and (request := self._oldest()) is not None:
                self._run_oldest(request)
        except Exception as error:  # the ranks cannot be known to be in step any more
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _oldest(self) -> Request[Any] | None:
        with self._submitted:
            return next(iter(self._outstanding.values()), None)

    def _run_oldest(self, request: Request[Any]) -> None:
        try:
            request.match(self.communicator)
        except MismatchError:
            self._agree()
        else:
            self._complete(request)

    def _agree(self) -> None:
        """Run what all ranks have; wait until there is something."""
        deadline = Deadline(self.communicator.timeout_s)
        while True:
            lists = exchange_outstanding(self.communicator, self._describe)
            steps = plan_steps(lists)
            missing = missing_ranks(lists)
            self._stalls.note(missing)
            if steps:
                break
            if deadline.expired:
                waiting = "; ".join(f"{name} for ranks {ranks}" for name, ranks in missing.items())
                raise CommunicatorTimeoutError(
                    f"No request was made by all ranks for {deadline.timeout_s:g} s: {waiting} still to come."
                )
            time.sleep(_CYCLE_S)
        for step in steps:
            self._take(step)

    def _describe(self) -> list[Description]:
        with self._submitted:
            return [request.description for request in self._outstanding.values()]

    def _take(self, step: Step) -> None:
        with self._submitted:
            request = self._outstanding.get(step.description.name)
        if step.error is not None:
            if request is not None:
                self._finish(request, HorovodInternalError(step.error))
            return
        if request is None:  # this rank has asked to join
            stand_in = self._make_stand_in(step.description)
            stand_in.match(self.communicator)
            stand_in.complete(self.communicator)
            return
        request.match(self.communicator)
        self._complete(request)

    def _complete(self, request: Request[Any]) -> None:
        try:
            request.complete(self.communicator)
        except HorovodInternalError as error:
            self._finish(request, error)
        else:
            self._finish(request)

    def _finish(self, request: Request[Any], error: BaseException | None = None) -> None:
        with self._completed:
            del self._outstanding[request.description.name]
            if request.description.kind is Kind.JOIN:
                # Ranks that had joined have not counted what the others ran without them.
                self._numbers.clear()
            request.error = error
            request.done = True
            if request.is_awaited:
                self._completed.notify_all()

    def _fail(self, error: BaseException) -> None:
        if self.communicator.failure is None:
            self.communicator.abort(f"rank {self.communicator.rank} failed: {type(error).__name__}: {error}")
        failure = HorovodInternalError(f"{_SHUT_DOWN} {error}")
        failure.__cause__ = error
        with self._completed:
            self._failure = self._failure or failure
        self._fail_outstanding(failure)

    def _fail_outstanding(self, failure: HorovodInternalError) -> None:
        with self._submitted:
            outstanding = list(self._outstanding.values())
        for request in outstanding:
            self._finish(request, failure)
