"""``hvd.SyncBatchNorm``: batch normalization with the statistics of all ranks' rows.

Runs on the *rank*; unlike Horovod's also on CPU tensors. One allreduce forth and one back, of two numbers per channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.horovod.torch.basics import size
from sparkdl.horovod.torch.operations.allreduce import allreduce
from sparkdl.horovod.torch.reduce_ops import Sum


class SyncBatchNorm(_BatchNorm):
    """Takes the place of ``torch.nn.BatchNorm1d``, ``2d`` and ``3d``, with the same arguments.

    The input has shape ``(rows, num_features, ...)``; the number of rows may differ between ranks.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; in training with the statistics of all ranks, which also move the running ones."""
        self._check_input_dim(input)
        if size() == 1 or not (self.training or not self.track_running_stats):
            return super().forward(input)
        normalized, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._move_running_statistics(mean, variance * (count / (count - 1)))
        return normalized  # type: ignore[no-any-return]  # torch does not type it

    def _move_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> Any:
        wide = _widen(input)
        axes = _all_but_channels(wide)
        count, mean, variance = _joint_statistics(wide, axes)
        scale = (variance + eps).rsqrt()
        centred = wide - _along_channels(mean, wide)
        normalized = centred * _along_channels(scale, wide)
        output = normalized
        if weight is not None:
            output = output * _along_channels(weight, wide)
        if bias is not None:
            output = output + _along_channels(bias, wide)
        ctx.save_for_backward(normalized, weight, scale)
        ctx.count, ctx.dtype, ctx.has_bias = count, input.dtype, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        normalized, weight, scale = ctx.saved_tensors
        grad = _widen(grads[0])
        axes = _all_but_channels(grad)
        grad_bias, grad_weight = grad.sum(axes), (grad * normalized).sum(axes)
        sums = allreduce(torch.stack([grad_bias, grad_weight]), op=Sum) / ctx.count
        centred = (
            grad - _along_channels(sums[0], grad) - normalized * _along_channels(sums[1], grad)
        ) * _along_channels(scale if weight is None else scale * weight, grad)
        return (
            centred.to(ctx.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(ctx.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
        )


def _joint_statistics(rows: torch.Tensor, axes: list[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Count, mean and biased variance per channel over the rows of all ranks.

    The variance is taken around the joint mean: a difference of large sums would lose its digits.
    """
    own_count = rows.numel() // rows.shape[1]
    sums = torch.cat([rows.sum(axes).double(), torch.tensor([float(own_count)], device=rows.device)])
    sums = allreduce(sums, op=Sum)
    count = int(sums[-1])
    mean = (sums[:-1] / count).to(rows.dtype)
    squares = (rows - _along_channels(mean, rows)).square().sum(axes).double()
    return count, mean, (allreduce(squares, op=Sum) / count).to(rows.dtype)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [axis for axis in range(tensor.dim()) if axis != 1]


def _along_channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
