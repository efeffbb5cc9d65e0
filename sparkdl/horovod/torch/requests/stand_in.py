"""What a rank that has asked to join, but still has other requests, runs when the others run one of theirs."""

from __future__ import annotations

from typing import Any

import torch

from sparkdl.horovod.torch.engine.description import Description, Kind
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.requests.adasum import GroupedAdasumRequest
from sparkdl.horovod.torch.requests.allreduce import GroupedAllreduceRequest
from sparkdl.horovod.torch.requests.meeting import BarrierRequest


def make_stand_in(description: Description) -> Request[Any]:
    """The same request with zeros for tensors; of the kinds that can run while ranks have joined."""
    zeros = [
        torch.zeros(shape, dtype=getattr(torch, dtype))
        for shape, dtype in zip(description.shapes, description.dtypes, strict=True)
    ]
    if description.kind is Kind.ALLREDUCE:
        return GroupedAllreduceRequest(
            description.name,
            zeros,
            zeros,
            op=description.op,
            prescale=description.prescale,
            postscale=description.postscale,
        )
    if description.kind is Kind.ADASUM:
        return GroupedAdasumRequest(
            description.name, zeros, zeros, prescale=description.prescale, postscale=description.postscale
        )
    assert description.kind is Kind.BARRIER
    return BarrierRequest(description.name)
