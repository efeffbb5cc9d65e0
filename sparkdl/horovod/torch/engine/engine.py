"""Runs the requests of one process set, on a thread that waits for one of them.

A synchronous operation thus needs no switch to another thread. The engine's own thread runs the requests that no thread
waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from sparkdl.collective import Communicator
from sparkdl.collective.operation_queue import refuse_signal_handler
from sparkdl.errors import list_names
from sparkdl.horovod.torch.engine.agreement import Agreement, Outstanding
from sparkdl.horovod.torch.engine.request import Description, Request
from sparkdl.horovod.torch.names import HorovodInternalError

# How long the engine's thread leaves new requests to a thread that may wait for them; Horovod's cycle time.
_CYCLE_S = 0.001
_GRACE_S = 1.0

_CYCLE_MARK = "CYCLE_START"
"""Horovod's name for the beginning of a cycle in a timeline."""

_SHUT_DOWN = "Horovod has been shut down."


class Engine:
    """The requests of one process set on this rank, and the communicator that they run on.

    Attributes:
        communicator: communicator of the process set; the engine owns and closes it.
        marks_cycles: whether a timeline shows where the engine begins to run requests.
    """

    def __init__(
        self,
        communicator: Communicator,
        make_stand_in: Callable[[Description], Request[Any]],
        before_close: Callable[[Communicator], None] = lambda _: None,
    ) -> None:
        """Start the engine's thread.

        Args:
            communicator: communicator of the process set; owned by the engine from now on.
            make_stand_in: function that makes the request that a rank which has asked to join runs in place of a
                request of the other ranks.
            before_close: function called before the communicator is closed.
        """
        self.communicator = communicator
        self._before_close = before_close
        self.marks_cycles = False
        self._num_waiting = 0
        self._driver: int | None = None
        """Identifier of the thread that runs requests."""
        lock = threading.RLock()  # reentrant: a signal handler may run at any line
        self._submitted = threading.Condition(lock)
        """Notifies the engine's thread that there may be a request to run."""
        self._completed = threading.Condition(lock)
        """Notifies waiting threads that a request is done, or that no thread drives the engine."""
        self.outstanding = Outstanding(self._completed)
        self._agreement = Agreement(communicator, self.outstanding, make_stand_in)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"horovod {communicator.name}", daemon=True)
        self._thread.start()

    def check_caller(self) -> None:
        """Return at once, unless this is a signal handler in the middle of an operation.

        Raises:
            CommunicatorError: if it is.
        """
        refuse_signal_handler(self._driver, self.communicator.name)

    def submit(self, request: Request[Any], *, will_wait: bool = False) -> None:
        """Add a request, to be run after the outstanding ones.

        Args:
            request: request to run.
            will_wait: whether the caller will call :meth:`wait` for it at once.

        Raises:
            ValueError: if a request of this name is outstanding.
            HorovodInternalError: if the engine has failed or is closed.
            CommunicatorError: if this is a signal handler in the middle of an operation.
        """
        self.check_caller()
        self.outstanding.add(request)
        if not will_wait:
            with self._submitted:
                if self._driver is None:
                    self._submitted.notify()

    def wait(self, request: Request[Any]) -> None:
        """Run the outstanding requests until ``request`` is done, or wait while another thread runs them.

        Raises:
            HorovodInternalError: if the request failed.
            CommunicatorError: if this is a signal handler in the middle of an operation.
        """
        self.check_caller()
        request.blocks_caller = True
        while self._take_turn(request):
            try:
                self._drive(lambda: request.done)
            finally:
                self._leave()
        if request.error is not None:
            raise HorovodInternalError(str(request.error)) from (request.error.__cause__ or request.error)

    def close(self) -> None:
        """Fail the outstanding requests, here and on the other ranks, and close the communicator.

        Raises:
            CommunicatorError: if this is a signal handler in the middle of an operation.
        """
        self.check_caller()
        shut_down = HorovodInternalError(_SHUT_DOWN)
        self.outstanding.refuse_more(shut_down)
        names = [request.description.name for request in self.outstanding.requests()]
        with self._submitted:
            self._closing.set()
            self._submitted.notify()
            # A request that all ranks have made is about to end by itself.
            is_free = self._completed.wait_for(lambda: self._driver is None, _GRACE_S)
        if not is_free:
            self.communicator.abort(
                f"rank {self.communicator.rank} shut Horovod down while it had {list_names(names)}"
            )
        with self._completed:
            self._completed.wait_for(lambda: self._driver is None)
            self._driver = threading.get_ident()
        self.outstanding.fail(shut_down)
        with ExitStack() as stack:  # each is done, whatever the others raise
            stack.callback(self._thread.join)
            stack.callback(self._leave)
            stack.callback(self.communicator.close)
            self._before_close(self.communicator)

    def _serve(self) -> None:
        while not self._closing.is_set():
            with self._submitted:
                self._submitted.wait_for(self._can_begin)
            self._closing.wait(_CYCLE_S)
            with self._submitted:
                if self._closing.is_set() or self._num_waiting or not self._can_begin():
                    continue
                self._driver = threading.get_ident()
            self._drive(lambda: self._num_waiting > 0)
            self._leave()

    def _can_begin(self) -> bool:
        return self._closing.is_set() or (len(self.outstanding) > 0 and self._driver is None)

    def _take_turn(self, request: Request[Any]) -> bool:
        """Wait until this thread may drive the engine; False if ``request`` is done first."""
        with self._completed:
            while not request.done and self._driver is not None:
                request.is_awaited = True
                self._num_waiting += 1
                try:
                    self._completed.wait()
                finally:
                    self._num_waiting -= 1
            if request.done:
                return False
            self._driver = threading.get_ident()
            return True

    def _leave(self) -> None:
        """Leave the remaining requests to a thread that waits for one of them, or to the engine's thread."""
        with self._submitted:
            self._driver = None
            self._completed.notify_all()
            if len(self.outstanding) > 0:
                self._submitted.notify()

    def _drive(self, is_over: Callable[[], bool]) -> None:
        """Run requests, as long as there are any, until ``is_over``."""
        if self.marks_cycles:
            self.communicator.telemetry.mark(self.communicator.name, _CYCLE_MARK)
        try:
            while not is_over() and self._agreement.run_oldest():
                pass
        except Exception as error:  # the ranks may no longer be at the same request
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self.communicator.failure is None and not self._agreement.ended_alike:
            self.communicator.abort(f"rank {self.communicator.rank} failed: {type(error).__name__}: {error}")
        failure = HorovodInternalError(f"{_SHUT_DOWN} {error}")
        failure.__cause__ = error
        self.outstanding.fail(failure)
