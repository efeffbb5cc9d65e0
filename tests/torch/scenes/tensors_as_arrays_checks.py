"""Checks of communicators that get tensors as arrays. Run on ranks, see :mod:`tests.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from sparkdl.collective import Communicator


def _communicator() -> Communicator:
    return dist.group.WORLD.communicator


def check_a_communicator_takes_tensors_as_they_lie() -> None:
    communicator = _communicator()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        whole = torch.arange(6, dtype=dtype)
        for tensor in (whole, whole[:0], torch.ones((), dtype=dtype), whole.view(2, 3)[1:], whole[2:]):
            before = tensor.clone()
            communicator.allreduce(tensor, name=f"{dtype}")
            assert torch.equal(tensor, before * communicator.world_size), (dtype, tensor, before)
    weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    communicator.allreduce(weight)
    assert weight.tolist() == [communicator.world_size] * 4


def check_a_queued_operation_holds_its_tensor() -> None:
    communicator = _communicator()
    handles = [communicator.allreduce_async(torch.ones(1 << 16)) for _ in range(8)]
    for handle in handles:
        handle.wait()


def check_tensors_need_not_be_contiguous() -> None:
    communicator = _communicator()
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        for view in (lambda x: x.t()[:2], lambda x: x[:, ::2], lambda x: x[:, :1]):
            for is_queued in (False, True):
                whole = torch.zeros(4, 4, dtype=dtype)
                part = view(whole)
                part[...] = torch.arange(part.numel()).view(part.shape) % 2
                expected = whole.clone() if dtype == torch.bool else whole * communicator.world_size
                communicator.allreduce_async(part).wait() if is_queued else communicator.allreduce(part)
                assert torch.equal(whole, expected)
    with pytest.raises(ParamError, match="share memory"):
        communicator.allreduce(torch.ones(1).expand(4))


def check_tensors_whose_memory_is_not_what_they_say_are_refused() -> None:
    communicator = _communicator()
    negative = torch.ones(3, dtype=torch.complex64).conj().imag
    adjacent = torch._neg_view(torch.ones(3))
    assert negative.is_neg()
    assert adjacent.is_neg()
    for bad in (
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True) * 2,
        negative,
        adjacent,
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch._efficientzerotensor(3),
        FakeTensorMode().from_tensor(torch.ones(3)),
    ):
        for call in (communicator.allreduce, communicator.allreduce_async):
            with pytest.raises(ParamError):
                call(bad)
    communicator.barrier()
    assert communicator.failure is None
