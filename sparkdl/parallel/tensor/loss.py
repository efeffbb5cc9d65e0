"""The cross entropy of logits whose classes are divided among ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparkdl.errors import ParamError
from sparkdl.parallel.collectives import apply


def cross_entropy(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup, *, ignore_index: int = -100
) -> Tensor:
    """Mean cross entropy of logits whose classes are divided among ranks, without gathering them.

    Args:
        logits: logits of this rank's classes, ``(..., classes / ranks)``, as a ``colwise`` head returns them.
        labels: class indices among all classes, ``(...)`` integers, the same on all ranks.
        group: process group of the tensor-parallel ranks.
        ignore_index: label of positions that do not count.

    Returns:
        A scalar of at least float32, the same on all ranks, with gradients; NaN if no position counts, as in torch.

    Raises:
        ParamError: if there is no group, or a label is not a class index; for CUDA tensors a device-side assertion
            fails later, as in torch.
    """
    if group is None:
        raise ParamError(
            'cross_entropy needs the group of the tensor-parallel ranks, got None. Give layout.group("tensor"), which '
            "is a group of one where tensor is 1."
        )
    flat = logits.reshape(-1, logits.shape[-1])
    losses = apply(_DividedCrossEntropy, flat, labels.reshape(-1), group, ignore_index)
    return losses.sum() / (labels != ignore_index).sum()


def _check_labels(labels: Tensor, classes: int, ignore_index: int) -> None:
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignore_index)
    if labels.is_cuda:
        torch._assert_async(~wrong.any(), f"a label is not among the {classes} classes")
    elif wrong.any():
        raise ParamError(
            f"The label {int(labels[wrong][0])} is neither from 0 to {classes - 1} nor ignore_index ({ignore_index}). "
            "Correct the labels, or give the head more classes."
        )


class _DividedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, ignore_index: int
    ) -> Tensor:
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        highest = values.amax(dim=-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (values - highest.unsqueeze(-1)).exp_()
        _check_labels(labels, logits.shape[-1] * dist.get_world_size(group), ignore_index)
        columns = labels - dist.get_rank(group) * logits.shape[-1]
        is_here = (columns >= 0) & (columns < logits.shape[-1])
        columns = columns.masked_fill(~is_here, 0)
        label_logits = values.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill_(~is_here, 0.0)
        sums = torch.stack([exponentials.sum(-1), label_logits])
        dist.all_reduce(sums, group=group)
        counts = labels != ignore_index
        losses = torch.where(counts, sums[0].log() + highest - sums[1], 0.0)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), columns, is_here, counts)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, columns, is_here, counts = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient.scatter_add_(-1, columns.unsqueeze(-1), -is_here.to(gradient.dtype).unsqueeze(-1))
        gradient.mul_((gradients[0] * counts).unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None
