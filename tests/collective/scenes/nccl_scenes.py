"""Scenes that the ranks of the NCCL tests play, with stand-ins for NCCL and CUDA."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sparkdl.collective import Communicator
from sparkdl.collective.buffers import DeviceArray
from sparkdl.collective.nccl.group import NcclGroup
from sparkdl.collective.nccl.opening import open_nccl_group
from tests.collective.scenes.failure_scenes import LONG_S, Outcome, error_of
from tests.collective.scenes.stall_scenes import cpu_seconds_of_a_wait
from tests.nccl_stand_in.gpu_memory import GpuArray, call, new_stream
from tests.run_ranks import RankEnvironment

Scene = Callable[[RankEnvironment, Communicator], Outcome]

INVALID_USAGE, SYSTEM_ERROR, CUDA_ERROR, REMOTE_ERROR = 5, 2, 1, 6

HINTS = [
    # The instruction to the stand-in, its last error, the text of NCCL's error, and the hint that sparkdl adds.
    (f"open={SYSTEM_ERROR}", "", "unhandled system error", "NCCL_DEBUG=INFO"),
    (f"open={SYSTEM_ERROR}", "Bootstrap : no socket interface found", "unhandled", "NCCL_SOCKET_IFNAME"),
    (f"open={SYSTEM_ERROR}", "Error while creating shared memory segment", "unhandled", "--shm-size"),
    (f"open={INVALID_USAGE}", "Duplicate GPU detected : rank 0", "invalid usage", "Two ranks use one GPU"),
    (f"open={CUDA_ERROR}", "Cuda failure 'out of memory'", "unhandled cuda", "memory is full"),
    (f"fail=ncclGetUniqueId:{SYSTEM_ERROR}", "", "rank 0: making a unique id failed", "NCCL_DEBUG=INFO"),
    (f"fail=ncclAllReduce:{INVALID_USAGE}", "", "invalid usage", "same operations in the same order"),
    (f"state={REMOTE_ERROR}", "", "remote process exited", "errors of the other ranks first"),
]


def play(environment: RankEnvironment) -> dict[str, Outcome]:
    """Play all scenes, each on its own communicator."""
    outcomes = {}
    for name, scene in SCENES.items():
        with environment.open(name=name, timeout_s=LONG_S) as communicator:
            outcomes[name] = scene(environment, communicator)
        tell_stand_in("")
    return outcomes


def tell_stand_in(order: str, last_error: str = "") -> None:
    os.environ["NCCL_STAND_IN"], os.environ["NCCL_STAND_IN_LAST_ERROR"] = order, last_error


def calls() -> list[str]:
    """The NCCL calls that this rank has made so far."""
    path = Path(f"{os.environ['NCCL_STAND_IN_CALLS']}-{os.getpid()}")
    return path.read_text().split() if path.exists() else []


def reduce_once(group: NcclGroup, timeout_s: float | None = None) -> None:
    array = GpuArray(np.ones(3), group.gpu)
    group.batch().allreduce(array).run(stream=0, timeout_s=timeout_s).wait(LONG_S)


def open_and_reduce(communicator: Communicator, timeout_s: float) -> None:
    with open_nccl_group(communicator, gpu=communicator.rank, timeout_s=timeout_s) as group:
        reduce_once(group)


def run_on_stream(stream: int, function: Callable[[], None]) -> object:
    """Call a Python function in the order of a stream; keep the returned object alive until then."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function())
    call("cuLaunchHostFunc", ctypes.c_void_p(stream), callback, None)
    return callback


def order_on_streams(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """The call returns while the GPU is busy with earlier work of the stream."""
    rank = environment.rank
    stream, is_free, is_occupied = new_stream(), threading.Event(), threading.Event()

    def occupy() -> None:
        is_occupied.set()
        is_free.wait(LONG_S)

    with open_nccl_group(communicator, gpu=rank) as group:
        array = GpuArray(np.zeros(3), rank, np.float32)
        kept = [run_on_stream(stream, occupy), run_on_stream(stream, lambda: array.host.fill(rank + 1))]
        assert is_occupied.wait(10.0)
        handle = group.batch().allreduce(array).run(stream=stream)
        seen = {"before": (handle.done(), float(array.host[0]))}
        is_free.set()
        handle.wait(LONG_S)
        del kept
        return {**seen, "after": (handle.done(), float(array.host[0]))}


def aborted(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    group = open_nccl_group(communicator, gpu=environment.rank)
    communicator.barrier()
    if environment.rank == 0:
        time_to_abort = error_of(lambda: group.abort("the loss is rotten"))["seconds"]
        return {**error_of(lambda: reduce_once(group)), "seconds to abort": time_to_abort}
    return error_of(lambda: reduce_once(group))


def exception_in_with(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    def body() -> None:
        with open_nccl_group(communicator, gpu=environment.rank) as group:
            if environment.rank == 1:
                raise ValueError("bad batch")
            reduce_once(group)

    return error_of(body)


def late_rank(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """The ranks wait for an operation that rank 1 calls too late.

    GPUs may complete it before NCCL is aborted on rank 0; then the next operation fails.
    """
    group = open_nccl_group(communicator, gpu=environment.rank)

    def reduce_twice() -> None:
        reduce_once(group)
        reduce_once(group)

    if environment.rank == 1:
        environment.rendezvous.get("rank 0 gave up", LONG_S)
    if environment.rank != 0:
        return error_of(reduce_twice)
    seen = error_of(lambda: reduce_once(group, timeout_s=0.5))
    environment.rendezvous.set("rank 0 gave up", b"")
    return seen


def late_wait(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """Only the wait that is too short fails; the operation continues."""
    rank = environment.rank
    with open_nccl_group(communicator, gpu=rank) as group:
        array = GpuArray(np.ones(3), rank)
        if rank == 1:
            environment.rendezvous.get("rank 0 waited", 30.0)
        handle = group.batch().allreduce(array).run(stream=0)
        seen = error_of(lambda: handle.wait(0.2)) if rank == 0 else {}
        environment.rendezvous.set(f"rank {rank} waited", b"")
        handle.wait(LONG_S)
        return {**seen, "value": float(array.host[0]), "failure": group.failure}


def told(orders: dict[int, str], last_error: str = "", timeout_s: float = LONG_S) -> Scene:
    """Make a scene that opens a group and reduces while the stand-in misbehaves on some ranks."""

    def scene(environment: RankEnvironment, communicator: Communicator) -> Outcome:
        tell_stand_in(orders.get(environment.rank, ""), last_error)
        num_aborts = calls().count("ncclCommAbort")
        seen = error_of(lambda: open_and_reduce(communicator, timeout_s))
        num_aborts = calls().count("ncclCommAbort") - num_aborts
        return {**seen, "communicator": communicator.failure, "aborts": num_aborts}

    return scene


def hints(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """The error messages that the only rank of a world gets for each failure."""
    messages = []
    for number, (order, last_error, _, _) in enumerate(HINTS):
        with communicator.split([environment.rank], f"{environment.rank}-{number}") as alone:
            tell_stand_in(order, last_error)
            messages.append(error_of(lambda alone=alone: open_and_reduce(alone, 10.0))["message"])  # type: ignore[misc]  # mypy cannot infer it
    return {"messages": messages}


def seeing(visible: dict[int, str], gpu: int) -> Scene:
    """Make a scene in which each rank sees other GPUs of the machine."""

    def scene(environment: RankEnvironment, communicator: Communicator) -> Outcome:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[environment.rank]
        try:
            return error_of(lambda: open_nccl_group(communicator, gpu=gpu))
        finally:
            del os.environ["CUDA_VISIBLE_DEVICES"]

    return scene


def wrong_arguments(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """Errors of the caller; the group remains usable after each of them."""
    rank = environment.rank
    with open_nccl_group(communicator, gpu=rank) as group:
        good, on_host = GpuArray(np.ones(4), rank, np.float32), np.zeros(4, np.float32)
        unknown = DeviceArray(pointer=on_host.ctypes.data, count=4, dtype="float32")
        seen = {
            name: error_of(lambda action=action: action().run(stream=0))  # type: ignore[misc]  # mypy cannot infer it
            for name, action in {
                "unknown memory": lambda: group.batch().allreduce(unknown),
                "other gpu": lambda: group.batch().allreduce(GpuArray(np.ones(4), rank + 2, np.float32)),
                "blocks": lambda: group.batch().allgather(good, good),
                "op": lambda: group.batch().allreduce(good, op="mean"),
                "int16": lambda: group.batch().allreduce(GpuArray(np.ones(4), rank, np.int16)),
                "scaled int": lambda: group.batch().allreduce(GpuArray([1], rank, np.int32), prescale=0.5),
                "root": lambda: group.batch().broadcast(good, root=7),
            }.items()
        }
        reduce_once(group)
        return seen


def idle(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    with open_nccl_group(communicator, gpu=environment.rank) as group:
        reduce_once(group)
        # The minimum of several measurements, as Python itself needs some time now and then.
        return {"cpu seconds": min(cpu_seconds_of_a_wait() for _ in range(3))}


def many_times(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """Open, use and close many times; return the numbers of threads and descriptors early and late."""

    def count() -> tuple[int, int]:
        gc.collect()
        samples = []
        for _ in range(20):
            # A thread of the stand-in may have a file open for a moment, which can be long on a busy machine.
            threading.Event().wait(0.03)
            samples.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        return min(threads for threads, _ in samples), min(fds for _, fds in samples)

    seen = {}
    for number in range(12):
        with open_nccl_group(communicator, gpu=environment.rank) as group:
            reduce_once(group)
        if number in (2, 11):
            communicator.barrier()
            seen[number] = count()
    return {"few": seen[2], "many": seen[11]}


def captured(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    """Operations that a CUDA graph only captures are not waited for."""
    with open_nccl_group(communicator, gpu=environment.rank) as group:
        stream = new_stream()
        call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
        group.batch().allreduce(GpuArray(np.ones(3), environment.rank)).run(stream=stream, timeout_s=0.1)
        return {"done": group.call(lambda core: core.done(0)), "failure": group.failure}


def closed(environment: RankEnvironment, communicator: Communicator) -> Outcome:
    group = open_nccl_group(communicator, gpu=environment.rank)
    group.close()
    group.close()
    seen = error_of(lambda: reduce_once(group))
    communicator.barrier()
    return {**seen, "communicator": communicator.failure}


SCENES: dict[str, Scene] = {
    "order": order_on_streams,
    "aborted": aborted,
    "exception": exception_in_with,
    "late rank": late_rank,
    "late wait": late_wait,
    "arguments": wrong_arguments,
    "idle": idle,
    "many": many_times,
    "captured": captured,
    "closed": closed,
    "hints": hints,
    # Ranks 0 and 2 both have GPU 3 of the machine for their GPU 0.
    "shared gpu": seeing({0: "3,1", 1: "2", 2: "3"}, 0),
    "no gpu": seeing({0: "0,1", 1: "1", 2: "2,3"}, 1),
    "hangs": told({1: "open=never"}, timeout_s=1.5),
    "cannot open": told(
        {1: f"fail=ncclCommInitRankConfig:{SYSTEM_ERROR}"}, "Call to connect failed: Connection refused"
    ),
    "refuses": told({1: f"fail=ncclAllReduce:{INVALID_USAGE}"}),
}
"""Scenes by name. One world plays them one after another, as starting ranks takes longer than most of them."""


def open_once(environment: RankEnvironment, orders: dict[int, str]) -> Outcome:
    """Open a group in fresh processes, for tests that depend on the loaded library."""
    with environment.open() as communicator:
        return told(orders, timeout_s=10.0)(environment, communicator)


def share_gpu(environment: RankEnvironment, orders: dict[int, str]) -> Outcome:
    """Open a group in fresh processes, all on the first GPU."""
    tell_stand_in(orders[environment.rank])
    with environment.open() as communicator:
        return error_of(lambda: open_nccl_group(communicator, gpu=0, timeout_s=10.0).close())


def lost_peer(environment: RankEnvironment) -> Outcome:
    """Rank 1 dies while the others wait for it on the GPU."""
    with environment.open(timeout_s=LONG_S) as communicator:
        group = open_nccl_group(communicator, gpu=environment.rank)
        communicator.barrier()
        if environment.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = error_of(lambda: reduce_once(group))
        seen["again"] = error_of(lambda: reduce_once(group))
        seen["failure"] = group.failure
        seen["to close"] = error_of(group.close)
        seen["calls"] = calls()
        return seen


def lost_peer_while_opening(environment: RankEnvironment) -> Outcome:
    tell_stand_in("open=never")
    with environment.open(timeout_s=LONG_S) as communicator:
        if environment.rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return error_of(lambda: open_nccl_group(communicator, gpu=environment.rank, timeout_s=LONG_S))
