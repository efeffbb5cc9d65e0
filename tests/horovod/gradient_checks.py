"""Gradients through the collectives are Horovod's: averaged where the loss of each rank would suggest a sum."""

from __future__ import annotations

import torch

import sparkdl.horovod.torch as hvd


def check_gradients_of_allreduce_are_reduced_alike() -> None:
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Average) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == [1.5] * 3
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0, compression=hvd.Compression.fp16).sum().backward()
    assert x.grad.tolist() == [6.0] * 3
    xs = [torch.ones(2, requires_grad=True), torch.ones(1)]
    sum(tensor.sum() for tensor in hvd.grouped_allreduce(xs, op=hvd.Sum)).backward()
    assert xs[0].grad.tolist() == [2.0] * 2
    assert xs[1].grad is None


def check_no_gradient_is_kept_where_none_is_wanted() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(torch.ones(3)).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad


def check_gradients_of_allgather_are_averaged_and_cut() -> None:
    rank = hvd.rank()
    x = torch.ones(rank + 1, requires_grad=True)
    (hvd.allgather(x) * torch.arange(3.0) * (1 + rank)).sum().backward()
    assert x.grad.tolist() == ([0.0] if rank == 0 else [1.5, 3.0])
    xs = [torch.ones(rank + 1, 2, requires_grad=True), torch.ones(2, requires_grad=True)]
    sum(tensor.sum() for tensor in hvd.grouped_allgather(xs)).backward()
    assert [tuple(x.grad.shape) for x in xs] == [(rank + 1, 2), (2,)]
    assert all((x.grad == 1).all() for x in xs)


def check_gradients_of_broadcast_go_to_the_root() -> None:
    x = torch.ones(2, requires_grad=True)
    (hvd.broadcast(x, 1) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == ([1.5] * 2 if hvd.rank() == 1 else [0.0] * 2)


def check_gradients_of_alltoall_go_the_way_back() -> None:
    rank = hvd.rank()
    x = torch.ones(4, requires_grad=True)
    received, _ = hvd.alltoall(x, splits=[1, 2])
    (received * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0, 2.0, 0.0]
    x = torch.ones(2, requires_grad=True)
    (hvd.alltoall(x) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0]


def check_gradients_of_reducescatter_are_gathered() -> None:
    rank = hvd.rank()
    x = torch.ones(3, requires_grad=True)
    (hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 2.0]
    xs = [torch.ones(2, requires_grad=True), torch.ones(4, 2, requires_grad=True)]
    sum(tensor.sum() for tensor in hvd.grouped_reducescatter(xs, op=hvd.Average)).backward()
    assert all((x.grad == 1).all() for x in xs)
