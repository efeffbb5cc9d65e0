"""How requests of the ranks are matched by name in any order, and the errors if they mismatch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.errors import CommunicatorTimeoutError
from sparkdl.horovod.torch.current_session import session
from tests.horovod.worlds import again_with

NUM_ROUNDS = 6
NAMES_PER_ROUND = 12


def check_ranks_may_submit_names_in_different_order() -> None:
    generator = random.Random(hvd.rank())
    for round_number in range(NUM_ROUNDS):
        names = [f"{round_number}.{number}" for number in range(NAMES_PER_ROUND)]
        generator.shuffle(names)
        handles = {}
        for name in names:
            number = int(name.split(".")[1])
            tensor = torch.full((number + 1,), float(number + hvd.rank()))
            if number % 3 == 0:
                handles[name] = hvd.allreduce_async(tensor, name=name, op=hvd.Sum)
            elif number % 3 == 1:
                handles[name] = hvd.allgather_async(tensor[: 1 + hvd.rank()], name=name)
            else:
                handles[name] = hvd.broadcast_async(tensor, 1, name=name)
        generator.shuffle(names)
        for name in names:
            number = int(name.split(".")[1])
            expected = [
                [2.0 * number + 1] * (number + 1),
                [float(number)] + [number + 1.0] * 2,
                [number + 1.0] * (number + 1),
            ]
            assert hvd.synchronize(handles[name]).tolist() == expected[number % 3]


def check_numbers_of_numpy_and_torch_match_in_any_order() -> None:
    tensor = torch.ones(2)
    calls = [
        lambda: hvd.allreduce_async(tensor, name="op", op=np.int64(hvd.Sum)),
        lambda: hvd.allreduce_async(
            tensor, name="scales", prescale_factor=np.float32(0.5), postscale_factor=torch.tensor(2.0)
        ),
        lambda: hvd.broadcast_async(tensor, np.int64(1), name="root"),
        lambda: hvd.reducescatter_async(tensor, name="rows", op=np.int8(hvd.Sum)),
    ]
    forwards = hvd.rank() == 0
    handles = [call() for call in (calls if forwards else calls[::-1])]
    results = [hvd.synchronize(handle).tolist() for handle in (handles if forwards else handles[::-1])]
    assert results == [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0], [2.0]]


def check_waiting_in_different_order_does_not_block() -> None:
    a, b = torch.ones(2), torch.ones(3)
    if hvd.rank() == 0:
        first = hvd.allreduce_async(a, name="a", op=hvd.Sum)
        assert hvd.allreduce(b, name="b", op=hvd.Sum).tolist() == [2.0] * 3
        assert hvd.synchronize(first).tolist() == [2.0] * 2
    else:
        second = hvd.allreduce_async(b, name="b", op=hvd.Sum)
        assert hvd.allreduce(a, name="a", op=hvd.Sum).tolist() == [2.0] * 2
        assert hvd.synchronize(second).tolist() == [2.0] * 3


def check_threads_may_run_different_names_at_once() -> None:
    def run(thread: int) -> None:
        for step in range(20):
            own = torch.full((4,), float(thread + step + hvd.rank()))
            reduced = hvd.allreduce(own, name=f"thread {thread}", op=hvd.Sum)
            assert reduced.tolist() == [2.0 * (thread + step) + 1] * 4

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))  # raises what a thread raised


def check_what_one_rank_asks_alone_does_not_hold_up_the_others() -> None:
    tensor = torch.ones(3)
    handle = hvd.allreduce_async(tensor, name="early", op=hvd.Sum) if hvd.rank() == 0 else None
    for _ in range(3):
        hvd.barrier()
        hvd.allreduce(tensor)
    assert handle is None or not hvd.poll(handle)
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(tensor, name="early", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [2.0] * 3


def check_a_name_that_is_outstanding_cannot_be_used_again() -> None:
    tensor = torch.ones(3)
    handles = [hvd.allreduce_async(tensor, name=f"twice on {hvd.rank()}")]
    with pytest.raises(ValueError, match="same name as another tensor that is currently being processed"):
        hvd.allreduce_async(tensor, name=f"twice on {hvd.rank()}")
    hvd.barrier()  # until here the other rank has not submitted this name
    handles.append(hvd.allreduce_async(tensor, name=f"twice on {1 - hvd.rank()}"))
    for handle in handles:
        hvd.synchronize(handle)


def assert_told_alike(call: Callable[[], object], message: str) -> None:
    """Assert that a call fails on all ranks with one text."""
    with pytest.raises(hvd.HorovodInternalError, match=message) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1


def check_every_mismatch_is_named_alike_on_all_ranks() -> None:
    rank = hvd.rank()
    numbers = torch.ones(4)
    cases = [
        (
            lambda: hvd.allreduce(torch.ones(2 + rank), name="m"),
            r"Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape \[2\], "
            r"but another rank sent a tensor of shape \[3\]\. "
            r"\(rank 0: allreduce\.m ALLREDUCE float32\[2\] op=0; rank 1: .*float32\[3\]",
        ),
        (
            lambda: hvd.allreduce(numbers.view((4, 1) if rank else (2, 2)), name="m"),
            r"shape \[2, 2\], but another rank sent a tensor of shape \[4, 1\]",
        ),
        (
            lambda: hvd.allreduce(numbers.to(torch.float32 if rank else torch.int32), name="m"),
            "Mismatched data types: One rank had type int32, but another rank had type float32",
        ),
        (
            lambda: hvd.allreduce(numbers, name="m", op=hvd.Sum if rank else hvd.Average),
            "Mismatched reduction operation: One rank sent reduction op 0, but another rank sent reduction op 1",
        ),
        (
            lambda: hvd.allreduce(numbers, name="m", op=hvd.Adasum if rank else hvd.Sum),
            "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ADASUM",
        ),
        (
            lambda: hvd.allreduce(numbers, name="m", prescale_factor=1.0 + rank),
            r"Mismatched prescale and/or postscale factors: One rank sent factors \(1, 1\), .*\(2, 1\)",
        ),
        (
            lambda: hvd.allgather(torch.ones(2, 2 + rank), name="m"),
            "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 2, "
            "but another rank sent a tensor with dimension 1 equal to 3",
        ),
        (
            lambda: hvd.allgather(torch.ones(2) if rank else torch.tensor(1.0), name="m"),
            "One rank sent a tensor of rank 0, but another rank sent a tensor of rank 1",
        ),
        (
            lambda: hvd.alltoall(torch.ones(2) if rank else torch.tensor(1.0), name="m"),
            "One rank sent a tensor of rank 0, but another rank sent a tensor of rank 1",
        ),
        (
            lambda: hvd.alltoall(torch.tensor(1.0), name="m"),
            "Process-set rank zero tried to ALLTOALL a rank-zero tensor",
        ),
        (
            lambda: hvd.broadcast(numbers, rank, name="m"),
            "Mismatched BROADCAST root ranks: One rank specified root rank 0, "
            "but another rank specified root rank 1",
        ),
        (
            lambda: hvd.grouped_allreduce([numbers] * (1 + rank), name="m"),
            "Mismatched ALLREDUCE groups: One rank sent 1 tensors, but another rank sent 2 tensors",
        ),
        (
            lambda: hvd.alltoall(numbers.view(2, 2) if rank else numbers, name="m"),
            "Mismatched ALLTOALL tensor shapes: One rank sent a tensor of rank 1, ",
        ),
        (
            lambda: hvd.reducescatter(numbers.view(2, 2) if rank else numbers, name="m"),
            "Mismatched REDUCESCATTER tensor shapes",
        ),
    ]
    for call, message in cases:
        assert_told_alike(call, message)


def check_different_operations_under_one_name_fail_and_the_session_goes_on() -> None:
    numbers = torch.ones(4)
    calls = (
        (lambda: hvd.allgather(numbers, name="m"), lambda: hvd.allreduce(numbers, name="m"), "ALLGATHER"),
        (
            lambda: hvd.synchronize(hvd.broadcast_async(numbers, 0, name="m")),
            lambda: hvd.grouped_allreduce([numbers], name="m"),
            "BROADCAST",
        ),
    )
    for *by_rank, kind in calls:
        message = (
            f"One rank did an {kind}, but another rank did an ALLREDUCE.*rank 0: .*rank 1: .*allreduce.m"
        )
        began = time.monotonic()
        assert_told_alike(by_rank[hvd.rank()], message)
        assert time.monotonic() - began < 20.0


def check_threads_have_time_to_ask_for_the_other_operation_of_a_name() -> None:
    calls = [
        lambda: hvd.allgather(torch.ones(1), name="of two threads").tolist(),
        lambda: hvd.allreduce(torch.ones(1), name="of two threads", op=hvd.Sum).tolist(),
    ]
    first, second = calls if hvd.rank() == 0 else calls[::-1]
    late: list[list[float]] = []
    timer = threading.Timer(0.3, lambda: late.append(second()))
    timer.start()
    results = [first()]
    timer.join()
    assert sorted(results + late) == [[1.0, 1.0], [2.0]]


def check_a_mismatch_leaves_what_is_in_place_untouched() -> None:
    tensor = torch.full((2 + hvd.rank(),), 7.0)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.allreduce_(tensor, name="untouched")
    assert (tensor == 7).all()
    handles = [hvd.allreduce_async_(torch.ones(1), name=f"after {number}", op=hvd.Sum) for number in range(3)]
    assert [hvd.synchronize(handle).item() for handle in handles] == [2.0] * 3


def check_ranks_that_never_agree_are_told_so_within_the_deadline() -> None:
    hvd.barrier()
    session().world.timeout_s, before = 2.0, session().world.timeout_s
    # Alternatively one of them waits too long for a step of their agreement.
    with pytest.raises(
        hvd.HorovodInternalError, match=r"allreduce\.only on 0 for ranks \[1\]|rank [01] failed|waited 2"
    ):
        hvd.allreduce(torch.ones(1), name=f"only on {hvd.rank()}")
    with pytest.raises(hvd.HorovodInternalError, match="has been shut down"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    hvd.init()
    assert session().world.timeout_s == before
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


def check_a_stalled_request_is_given_up_alike_on_all_ranks_long_before_the_deadline() -> None:
    message = "allreduce.of 0 stalled for 1 s: rank 1 .*; allreduce.of 1 stalled for 1 s: rank 0 "
    with again_with(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1"):
        began = time.monotonic()
        with pytest.raises(hvd.HorovodInternalError, match=message) as caught:
            hvd.allreduce(torch.ones(1), name=f"of {hvd.rank()}")
        assert 1.0 <= time.monotonic() - began < session().world.timeout_s / 2
        assert type(caught.value.__cause__) is CommunicatorTimeoutError
        with pytest.raises(hvd.HorovodInternalError, match="has been shut down"):
            hvd.allreduce(torch.ones(1))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


def check_what_some_rank_asks_for_too_long_alone_is_given_up_though_others_go_on() -> None:
    with again_with(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1"):
        if hvd.rank() == 0:
            hvd.allreduce_async(torch.ones(1), name="alone")
        began = time.monotonic()
        with pytest.raises(
            hvd.HorovodInternalError, match="allreduce.alone stalled for 1 s: rank 1 did not ask"
        ):
            while time.monotonic() - began < 60.0:
                hvd.barrier()
