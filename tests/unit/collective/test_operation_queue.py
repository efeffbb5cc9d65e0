from __future__ import annotations

import threading

import pytest

from sparkdl.collective.operation_queue import OperationQueue
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError


def test_operations_run_in_the_order_of_submission() -> None:
    turns, order, gate = OperationQueue("test"), [], threading.Event()
    turns.submit(lambda: gate.wait(5.0) and None)
    handles = [turns.submit(lambda number=number: order.append(number)) for number in range(5)]
    gate.set()
    turns.run(lambda: order.append(5))
    assert order == [0, 1, 2, 3, 4, 5]
    assert all(handle.done() for handle in handles)
    turns.close()


def test_synchronous_operation_runs_on_the_callers_thread_when_nothing_is_queued() -> None:
    turns, threads = OperationQueue("test"), []
    turns.run(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
    turns.close()


def test_wait_raises_the_error_of_an_operation_and_the_next_operation_runs() -> None:
    turns = OperationQueue("test")

    def fail() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        turns.submit(fail).wait()
    with pytest.raises(ValueError, match="bad"):
        turns.run(fail)
    turns.submit(lambda: None).wait(5.0)
    turns.close()


def test_wait_has_a_deadline_of_its_own() -> None:
    turns, gate = OperationQueue("test"), threading.Event()
    handle = turns.submit(lambda: gate.wait(5.0) and None)
    with pytest.raises(CommunicatorTimeoutError, match=r"0\.01 s"):
        handle.wait(0.01)
    gate.set()
    handle.wait(5.0)
    turns.close()


def test_closed_queue_refuses_operations_as_a_closed_communicator_does() -> None:
    turns = OperationQueue("world")
    turns.close()
    for _ in range(2):
        with pytest.raises(CommunicatorError, match="communicator 'world' is closed"):
            turns.submit(lambda: None)
