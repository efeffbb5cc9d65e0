"""Functions that the ranks of the tests of real NCCL run, without torch.distributed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.collective.nccl.group import NcclGroup
from sparkdl.collective.nccl.opening import open_nccl_group
from sparkdl.errors import CommunicatorError, SparkdlError
from sparkdl.torch.gpu.nccl import describe_tensor
from tests.gpu.gpu_scenes import own_device
from tests.run_ranks import RankEnvironment

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)


@contextmanager
def nccl_group(environment: RankEnvironment) -> Iterator[tuple[NcclGroup, torch.device]]:
    device = own_device(environment)
    with environment.open() as communicator, open_nccl_group(communicator, gpu=device.index) as group:
        yield group, device


def run(group: NcclGroup, batch: Any) -> None:
    batch.run(stream=torch.cuda.current_stream().cuda_stream).wait(60.0)


def operations(environment: RankEnvironment) -> dict[str, bool]:
    """Run each operation on arrays that torch describes; return whether its result was right."""
    rank, size = environment.rank, environment.world_size
    seen = {}
    with nccl_group(environment) as (group, device):
        for dtype in DTYPES:
            tensor = torch.full((1000,), rank + 1, device=device).to(dtype)
            run(group, group.batch().allreduce(describe_tensor(tensor)))
            total = 1 if dtype == torch.bool else size * (size + 1) // 2
            seen[f"allreduce {dtype}"] = bool((tensor == total).all())
        scaled = torch.full((10,), 1.0, device=device, dtype=torch.bfloat16)
        run(group, group.batch().allreduce(describe_tensor(scaled), op="avg", prescale=0.5))
        seen["prescale"] = bool((scaled == 0.5).all())
        gathered = torch.zeros(size, 3, device=device)
        run(
            group,
            group.batch().allgather(
                describe_tensor(torch.full((3,), float(rank), device=device)), describe_tensor(gathered)
            ),
        )
        seen["allgather"] = gathered[:, 0].tolist() == list(range(size))
        block = torch.zeros(2, device=device)
        run(
            group,
            group.batch().reduce_scatter(
                describe_tensor(torch.ones(2 * size, device=device)), describe_tensor(block)
            ),
        )
        seen["reduce_scatter"] = bool((block == size).all())
        received = torch.zeros(5, device=device)
        sent = torch.full((5,), float(rank), device=device)
        run(
            group,
            group.batch()
            .send(describe_tensor(sent), to=(rank + 1) % size)
            .recv(describe_tensor(received), source=(rank - 1) % size),
        )
        seen["ring"] = bool((received == (rank - 1) % size).all())
    return seen


def library(environment: RankEnvironment) -> tuple[str, str]:
    """Version and path of the NCCL library."""
    device = own_device(environment)
    from sparkdl.collective.nccl.opening import load_nccl

    loaded = load_nccl()
    assert str(torch.cuda.get_device_properties(device).uuid) in loaded.gpu_id(device.index)[0]
    return loaded.version, loaded.path


def waits_for_the_stream(environment: RankEnvironment) -> tuple[float, bool, float]:
    """Seconds of a call while the GPU is busy, whether the operation was done by then, and its result."""
    with nccl_group(environment) as (group, device):
        tensor = torch.zeros(1 << 20, device=device)
        run(group, group.batch().allreduce(describe_tensor(tensor)))
        torch.cuda._sleep(1 << 30)
        tensor.fill_(environment.rank + 1)
        start = time.monotonic()
        handle = (
            group.batch()
            .allreduce(describe_tensor(tensor))
            .run(stream=torch.cuda.current_stream().cuda_stream)
        )
        seconds, is_done = time.monotonic() - start, handle.done()
        tensor *= 2
        return seconds, is_done, float(tensor[0])


def graph(environment: RankEnvironment) -> float:
    """The result of an allreduce that a CUDA graph captured once and replays."""
    with nccl_group(environment) as (group, device):
        tensor = torch.ones(16, device=device)
        run(group, group.batch().allreduce(describe_tensor(tensor)))
        tensor.fill_(1.0)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            group.batch().allreduce(describe_tensor(tensor)).run(
                stream=torch.cuda.current_stream().cuda_stream
            )
        for _ in range(3):
            captured.replay()
        torch.cuda.synchronize()
        captured.reset()  # NCCL does not close before its graphs are gone
        return float(tensor[0])


def lost_peer(environment: RankEnvironment) -> dict[str, Any]:
    """Rank 1 dies while the others wait for it on the GPU."""
    device = own_device(environment)
    with environment.open() as communicator:
        group = open_nccl_group(communicator, gpu=device.index)
        run(group, group.batch().allreduce(describe_tensor(torch.ones(4, device=device))))
        communicator.barrier()
        if environment.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            run(group, group.batch().allreduce(describe_tensor(torch.ones(1 << 22, device=device))))
        except CommunicatorError as error:
            torch.cuda.synchronize()  # nothing is left waiting on the GPU
            seen = {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
        group.close()
        return seen


def late_rank(environment: RankEnvironment) -> dict[str, Any]:
    device = own_device(environment)
    with environment.open() as communicator:
        group = open_nccl_group(communicator, gpu=device.index)
        run(group, group.batch().allreduce(describe_tensor(torch.ones(4, device=device))))
        if environment.rank == 1:
            environment.rendezvous.get("gave up", 60.0)
            return {}
        handle = (
            group.batch()
            .allreduce(describe_tensor(torch.ones(4, device=device)))
            .run(stream=0, timeout_s=1.0)
        )
        try:
            handle.wait(30.0)
        except CommunicatorError as error:
            torch.cuda.synchronize()
            return {"kind": type(error).__name__, "message": str(error)}
        finally:
            environment.rendezvous.set("gave up", b"")
        return {}


def shared_gpu(environment: RankEnvironment) -> str:
    """The error message of two ranks that share a GPU."""
    try:
        with nccl_group(environment):
            return "no error"
    except SparkdlError as error:
        return f"{type(error).__name__}: {error}"


def host_array(environment: RankEnvironment) -> str:
    """The error message for an address that CUDA does not know."""
    with nccl_group(environment) as (group, device):
        wrong = torch.ones(4)
        from sparkdl.collective.buffers import DeviceArray

        array = DeviceArray(pointer=wrong.data_ptr(), count=4, dtype="float32")
        try:
            group.batch().allreduce(array).run(stream=0)
        except ValueError as error:
            run(group, group.batch().allreduce(describe_tensor(torch.ones(4, device=device))))
            return str(error)
    return "no error"
