"""The raw extension on real processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from sparkdl import _native, errors
from sparkdl.errors import ParamError
from tests.unit.forked_ranks import World, fork_ranks

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 45.0
PROMPTLY_S = 30.0
"""Many times what is needed on an idle machine, and far below the deadline that must not be waited for."""


def _reduce_bfloat16(communicator: _native.Communicator, rank: int) -> list[float]:
    import torch

    torch.set_num_threads(1)
    # 256 + 1 + 1 + 1 in bfloat16 would stay 256: its next number is 258.
    tensor = torch.full((5,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    communicator.allreduce(tensor)
    return [float(value) for value in tensor]


@pytest.mark.parametrize("host_of_rank", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1]], ids=str)
def test_bfloat16_of_torch_accumulates_in_float32(host_of_rank: list[int]) -> None:
    pytest.importorskip("torch")  # imported once before the fork, not once per rank
    for outcome in fork_ranks(World(host_of_rank), _reduce_bfloat16):
        assert outcome == [260.0] * 5  # 259 rounded once, to even


def _leave_a_forked_child(communicator: _native.Communicator, rank: int) -> str:
    if rank == 1:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                communicator.barrier()
            except errors.CommunicatorError as error:
                os.write(writer, str(error).encode())
            signal.pause()
        message = os.read(reader, 1000).decode()
        assert "only the rank itself can use it" in message
        communicator.allreduce_async(np.array([child], np.int64)).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    child_of_peer = np.zeros(1, np.int64)
    communicator.allreduce_async(child_of_peer).wait()
    begun = time.monotonic()
    try:
        with pytest.raises(errors.RankLostError) as caught:
            communicator.barrier()
        assert time.monotonic() - begun < PROMPTLY_S
        return str(caught.value)
    finally:
        os.kill(int(child_of_peer[0]), signal.SIGKILL)


def test_death_of_a_rank_is_detected_although_its_forked_child_lives() -> None:
    message, _ = fork_ranks(World([0, 0], DEADLINE_S), _leave_a_forked_child, dies=[1])
    assert "rank 1 was lost" in message


def _abort(communicator: _native.Communicator, rank: int) -> tuple[str, str | None]:
    if rank == 2:
        communicator.abort("the loss is not finite — stopped")
    with pytest.raises(errors.CommunicatorAbortedError) as caught:
        communicator.allreduce(np.zeros(3, np.float32))
    return str(caught.value), communicator.failure


def test_abort_reaches_all_ranks_with_its_reason() -> None:
    for message, failure in fork_ranks(World([0, 0, 1, 1]), _abort):
        assert message == failure == "rank 2 aborted: the loss is not finite — stopped"


def _interrupt_oneself(communicator: _native.Communicator, rank: int) -> str | None:
    if rank == 0:
        # SIGINT is ignored if the tests were started in the background of a script.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            communicator.allreduce(np.zeros(3, np.float32))
    while communicator.failure is None:
        os.sched_yield()
    return communicator.failure


def test_keyboard_interrupt_ends_a_blocked_operation_everywhere() -> None:
    for failure in fork_ranks(World([0, 0]), _interrupt_oneself):
        assert failure == "rank 0 stopped: a signal interrupted allreduce of 3 float32"


def _drop_handle(communicator: _native.Communicator, rank: int) -> bool:
    for _ in range(50):
        communicator.allreduce_async(np.zeros(100_000, np.float32))
    kept = np.ones(3, np.float32)
    communicator.allreduce(kept)
    return bool((kept == 2).all())


def test_dropped_handles_keep_their_arrays_until_done() -> None:
    assert fork_ranks(World([0, 0]), _drop_handle) == [True, True]


@pytest.fixture
def alone() -> _native.Communicator:
    return World([0]).open(0)


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


SHARED = np.lib.stride_tricks.as_strided(np.zeros(4), (2, 2), (8, 8))
PAIR = [np.zeros(4)] * 2
MIXED = [np.zeros(4), np.zeros(4, np.float32)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda to: to.allreduce(np.zeros(4), op="mean"), "op must be 'sum', .* got 'mean'"),
        (lambda to: to.allreduce(np.zeros(4, ">f4")), "array has dtype >f4, which is byte-swapped"),
        (lambda to: to.allreduce(SHARED), "array has elements that share memory"),
        (lambda to: to.allgather_group(MIXED, PAIR), r"arrays\[1\] is float32, outs\[1\] is float64"),
        (
            lambda to: to.reduce_scatter_group(PAIR, PAIR, counts=[None, [3]]),
            r"outs\[1\] must hold counts\[1\]\[0\] elements: 3, got 4",
        ),
        (lambda to: to.allgather_group(PAIR, PAIR[:1]), "as many outs as arrays, which are 2, got 1"),
        (lambda to: to.allreduce(read_only(np.zeros(4))), "array is read-only"),
        (lambda to: to.allreduce(np.zeros(4, np.complex64)), "unsupported dtype"),
        (lambda to: to.allreduce(np.zeros(4, np.bool_), op="avg"), "bools have no average"),
        (lambda to: to.allreduce([1.0]), "array must be a NumPy array.* got <class 'list'>"),
        (lambda to: to.broadcast(np.zeros(4), root=1), "root 1 is outside a world of 1 ranks"),
        (
            lambda to: to.allgather(np.zeros(4), np.zeros(5)),
            "out must hold world_size = 1 times .*: 4, got 5",
        ),
        (lambda to: to.allgather(np.zeros(4), np.zeros(4), counts=[-4]), "counts has -4 elements"),
        (
            lambda to: to.reduce_scatter(np.zeros(4, np.float32), np.zeros(4)),
            "array is float32, out is float64",
        ),
        (lambda to: to.barrier(timeout_s=0), "timeout_s must be a positive number of seconds, got 0"),
    ],
)
def test_bad_arguments_are_named_with_their_values_and_do_no_harm(
    alone: _native.Communicator, call: Callable[[_native.Communicator], None], message: str
) -> None:
    with pytest.raises(ParamError, match=message):
        call(alone)
    assert alone.failure is None
    alone.close()
    alone.close()


def test_counts_whose_sum_overflows_are_refused() -> None:
    communicator = World([0, 0, 0]).open(0)
    array = np.zeros(4, np.float32)
    with pytest.raises(ParamError, match="array must hold the sum of counts: .* got 4"):
        communicator.reduce_scatter(array, np.zeros(6, np.float32), counts=[6, 2**63 - 1, 2**63 - 1])
    with pytest.raises(ParamError, match="out must hold the sum of receive_counts: .* got 4"):
        communicator.alltoall(
            array, np.zeros(4, np.float32), send_counts=[4, 0, 0], receive_counts=[6, 2**63 - 1, 2**63 - 1]
        )


def test_descriptors_that_do_not_fit_the_topology_are_refused() -> None:
    options = {"rank": 0, "segment_fd": -1, "lane_fds": (-1, -1), "lifeline_fds": (-1, -1), "timeout_s": 1}
    with pytest.raises(ParamError, match="segment_fd must be a file descriptor"):
        _native.Communicator(**options, host_of_rank=[0, 0])
    with pytest.raises(ParamError, match="must number hosts by first appearance"):
        _native.Communicator(**options, host_of_rank=[1, 0])
    options["segment_fd"] = os.memfd_create("small")
    options["lifeline_fds"] = tuple(end.detach() for end in socket.socketpair())
    with pytest.raises(ParamError, match=r"has 0 bytes, 2 ranks need segment_bytes\(2\)"):
        _native.Communicator(**options, host_of_rank=[0, 0])


def test_idle_communicator_uses_no_processor_time(alone: _native.Communicator) -> None:
    alone.barrier_async().wait()

    def cpu_seconds_of_a_wait() -> float:
        before = time.process_time()
        threading.Event().wait(0.3)
        return time.process_time() - before

    # Several measurements, because threads left by other tests may need some time now and then.
    assert any(cpu_seconds_of_a_wait() < 0.02 for _ in range(5))
    alone.close()
