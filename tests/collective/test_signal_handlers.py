"""A signal handler that calls the communicator whose operation it interrupts is refused, and never waits for itself."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sparkdl.collective.telemetry.stalls import pending_waits
from sparkdl.errors import CommunicatorError
from tests.collective.eventually import eventually
from tests.run_ranks import RankEnvironment, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sparkdl.collective import Communicator

CALLS: dict[str, Callable[[Communicator], Any]] = {
    "operation": lambda communicator: communicator.barrier(),
    "queued operation": lambda communicator: communicator.allreduce_async(np.ones(1)).wait(),
    "close": lambda communicator: communicator.close(),
}
REFUSAL = "a signal handler called"


@contextmanager
def signal_in_an_operation() -> Iterator[None]:
    """Send SIGUSR1 to the main thread, which calls this, once it waits in an operation inside of the block."""
    main = threading.get_ident()

    def send() -> None:
        assert eventually(lambda: bool(pending_waits()), timeout_s=60.0)
        signal.pthread_kill(main, signal.SIGUSR1)

    sending = threading.Thread(target=send)
    sending.start()
    yield
    sending.join()


def interrupt(environment: RankEnvironment, call: str) -> tuple[str, str]:
    """Rank 0 makes the call in a handler while it waits for rank 1, which comes only when rank 0 has failed."""
    communicator = environment.open(timeout_s=60.0)
    if environment.rank == 1:
        assert eventually(lambda: communicator.failure is not None, timeout_s=100.0)
        communicator.close()
        return "", communicator.failure
    in_handler = []

    def handle(*_: object) -> None:
        try:
            CALLS[call](communicator)
        except CommunicatorError as error:
            in_handler.append(str(error))
            raise

    signal.signal(signal.SIGUSR1, handle)
    with signal_in_an_operation(), pytest.raises(CommunicatorError, match=REFUSAL):
        communicator.barrier()
    failure = communicator.failure
    communicator.close()
    return in_handler[0], str(failure)


@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.parametrize("call", CALLS)
def test_calls_in_a_handler_are_refused_and_end_the_operation_of_all_ranks(call: str, transport: str) -> None:
    (in_handler, failure), (_, of_other) = run_ranks(2, interrupt, call, transport=transport, timeout_s=120.0)
    assert REFUSAL in in_handler
    assert failure
    assert of_other


def interrupt_and_go_on(environment: RankEnvironment) -> list[float]:
    """Rank 0 takes the error in its handler, and rank 1 comes after that."""
    with environment.open(timeout_s=60.0) as communicator:

        def handle(*_: object) -> None:
            with pytest.raises(CommunicatorError, match=REFUSAL):
                communicator.barrier()
            environment.rendezvous.set("asked", b"")

        signal.signal(signal.SIGUSR1, handle)
        ones = np.ones(2)
        if environment.rank == 1:
            environment.rendezvous.get("asked", 60.0)
        with signal_in_an_operation() if environment.rank == 0 else nullcontext():
            communicator.allreduce(ones)
        communicator.barrier()
        return ones.tolist()


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_an_operation_goes_on_after_a_handler_that_takes_the_refusal(transport: str) -> None:
    assert run_ranks(2, interrupt_and_go_on, transport=transport, timeout_s=120.0) == [[2.0, 2.0]] * 2
