"""Batch normalization with the statistics of all ranks' rows, for tensors of any device.

In training, a forward pass computes one sum over the ranks for the means and one for the variances, and a backward pass
one sum of two numbers per channel. In evaluation there are none, so that ranks may evaluate different numbers of
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

AddUp: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Returns the sum of a tensor over all ranks."""


class CrossRankBatchNorm(_BatchNorm):
    """Replaces ``torch.nn.BatchNorm1d``, ``2d`` and ``3d``, with the same arguments.

    The input has shape ``(rows, num_features, ...)``; the number of rows may differ between ranks. The ranks are those
    of torch.distributed's default group.

    Attributes:
        counts_rows: whether this rank's rows count; False on a rank that takes part only because others wait for it.
    """

    counts_rows = True

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _num_ranks(self) -> int:
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def _add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the input; in training with the statistics of all ranks, which also update the running statistics.

        In evaluation no rank waits for another, even without running statistics: like torch's layers, each rank then
        uses the statistics of its own rows. In training, a single value per channel on all ranks together has no
        variance: the running statistics normalize it and are not updated.
        """
        self._check_input_dim(input)
        if not self.training or self._num_ranks() == 1:
            return super().forward(input)
        running = (self.running_mean, self.running_var) if self.track_running_stats else None
        normalized, mean, variance, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self._add_up, float(self.counts_rows), running
        )
        if self.track_running_stats and count > 1:
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


@contextmanager
def synchronized_batch_norms(module: nn.Module) -> Iterator[None]:
    """Within this context, a module's BatchNorms are synchronized, with the same parameters, buffers and names."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                replaced.append((parent, name, layer))
                setattr(parent, name, _synchronize(layer))
    try:
        yield
    finally:
        for parent, name, layer in replaced:
            layer.train(getattr(parent, name).training)
            setattr(parent, name, layer)


def _synchronize(layer: _BatchNorm) -> CrossRankBatchNorm:
    twin = CrossRankBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    )
    # The same tensor objects, so that both layers are trained.
    twin._parameters, twin._buffers, twin.training = layer._parameters, layer._buffers, layer.training
    return twin


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        add_up: AddUp,
        share: float,
        running: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Any:
        wide = _widen(input)
        axes = [0, *range(2, wide.dim())]  # all but channels
        count, mean, variance = _joint_statistics(wide, axes, add_up, share)
        ctx.has_statistics = count > 1 or running is None
        if running is not None and count == 1:
            mean, variance = (statistic.to(wide.dtype, copy=True) for statistic in running)
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
        ctx.add_up, ctx.share = add_up, share
        ctx.mark_non_differentiable(mean, variance)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        normalized, weight, scale = ctx.saved_tensors
        grad = _widen(grads[0])
        axes = [0, *range(2, grad.dim())]  # all but channels
        grad_bias, grad_weight = grad.sum(axes), (grad * normalized).sum(axes)
        centred = grad
        if ctx.has_statistics:  # the same on all ranks
            sums = ctx.add_up(torch.stack([grad_bias, grad_weight])) / ctx.count
            # Rows that did not count have not changed the mean or the variance.
            centred = grad - ctx.share * (
                _along_channels(sums[0], grad) + normalized * _along_channels(sums[1], grad)
            )
        centred = centred * _along_channels(scale if weight is None else scale * weight, grad)
        return (
            centred.to(ctx.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(ctx.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
            None,
            None,
        )


def _joint_statistics(
    rows: torch.Tensor, axes: list[int], add_up: AddUp, share: float
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Count, mean and biased variance per channel over the rows of all ranks.

    The variance is computed around the joint mean: a difference of large sums would lose precision.
    """
    own_count = rows.numel() // rows.shape[1]
    sums = torch.cat([rows.sum(axes).double(), torch.tensor([float(own_count)], device=rows.device)])
    sums = add_up(sums * share)
    count = int(sums[-1])
    mean = (sums[:-1] / count).to(rows.dtype)
    squares = (rows - _along_channels(mean, rows)).square().sum(axes).double()
    return count, mean, (add_up(squares * share) / count).to(rows.dtype)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _along_channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
