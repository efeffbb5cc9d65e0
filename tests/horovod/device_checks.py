"""Checks of the route of CUDA tensors on two ranks, on any device: torch's default one."""

from __future__ import annotations

from unittest import mock

import torch

import sparkdl.horovod.torch as hvd
from sparkdl.horovod.torch.current_session import session
from sparkdl.horovod.torch.operations import device_route
from tests.collective.eventually import eventually

ELEMENTS = 1 << 18
SMALL_BYTES = 1 << 15
"""More than the ranks exchange to agree on the requests of a check, and less than the tensors of one."""


def check_no_tensor_goes_through_host_memory() -> None:
    rank, size = hvd.rank(), hvd.size()
    hvd.allreduce(torch.ones(1))  # opens NCCL
    session().world.report(reset=True)
    tensor = torch.full((ELEMENTS,), float(rank + 1))
    assert hvd.allreduce(tensor, op=hvd.Sum).eq(3).all()
    assert hvd.grouped_allreduce([tensor, tensor.double()], op=hvd.Max)[1].eq(2).all()
    assert hvd.broadcast(tensor, 1).eq(2).all()
    assert hvd.allgather(tensor[: ELEMENTS - rank]).sum() == 3 * ELEMENTS - 2
    assert hvd.alltoall(tensor.clone()).sum() == 1.5 * ELEMENTS
    assert hvd.reducescatter(tensor, op=hvd.Sum).sum() == 1.5 * ELEMENTS
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)])
    (parameter * tensor).sum().backward()
    optimizer.step()
    assert parameter.eq(-1.5).all()
    assert size == 2
    assert sum(row.bytes for row in session().world.report().operations) < SMALL_BYTES


def check_results_are_those_of_host_memory() -> None:
    generator = torch.Generator("cpu").manual_seed(hvd.rank())
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int16):
        values = torch.randint(-8, 9, (6, 5), generator=generator, device="cpu").to(dtype)
        for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
            for prescale, postscale in ((1.0, 1.0), (0.5, 4.0)):
                factors = {"prescale_factor": prescale, "postscale_factor": postscale}
                on_route = hvd.allreduce(values.to(torch.get_default_device()), op=op, **factors)
                torch.testing.assert_close(on_route.cpu(), _in_host_memory(values, op=op, **factors))


def check_requests_run_together_and_orders_may_differ() -> None:
    names = [str(number) for number in range(40)]
    for order in (names, names if hvd.rank() == 0 else names[::-1]):
        hvd.barrier()
        handles = {
            name: hvd.allreduce_async_(torch.full((int(name) + 1,), float(hvd.rank())), op=hvd.Sum, name=name)
            for name in order
        }
        for name in names if hvd.rank() == 1 else names[::-1]:
            assert hvd.synchronize(handles[name]).tolist() == [1.0] * (int(name) + 1)


def check_handle_is_polled_until_the_device_is_done() -> None:
    handle = hvd.allreduce_async(torch.ones(4), op=hvd.Sum)
    assert eventually(lambda: hvd.poll(handle), timeout_s=20.0)
    assert hvd.synchronize(handle).tolist() == [2.0] * 4
    assert hvd.synchronize(handle) is None


def check_compressed_gradients_take_the_route() -> None:
    tensor = torch.full((8,), hvd.rank() + 1.0)
    reduced = hvd.allreduce(tensor, compression=hvd.Compression.fp16)
    assert (reduced.dtype, reduced.tolist()) == (torch.float32, [1.5] * 8)


def check_tensors_on_another_gpu_than_the_route_go_through_host_memory() -> None:
    hvd.allreduce(torch.ones(1))  # opens NCCL
    routes, rank = device_route.routes, hvd.rank()
    with mock.patch.object(routes, "is_elsewhere", return_value=rank == 1):  # there is one GPU
        session().world.report(reset=True)
        tensor = torch.full((ELEMENTS,), rank + 1.0)
        assert hvd.allreduce(tensor, op=hvd.Sum).eq(3).all()
        assert hvd.broadcast(tensor, 1).eq(2).all()
        assert hvd.allgather(tensor).sum() == 3 * ELEMENTS
        assert hvd.alltoall(tensor.clone()).sum() == 1.5 * ELEMENTS
        assert hvd.reducescatter(tensor, op=hvd.Sum).sum() == 1.5 * ELEMENTS
        assert sum(row.bytes for row in session().world.report().operations) > SMALL_BYTES


def _in_host_memory(values: torch.Tensor, **options: object) -> torch.Tensor:
    """The result of the communicator."""
    routes = device_route.routes
    device_route.routes = type("HostRoutes", (device_route.Routes,), {"serves": lambda self, tensor: False})()
    try:
        return hvd.allreduce(values, **options)
    finally:
        device_route.routes = routes
