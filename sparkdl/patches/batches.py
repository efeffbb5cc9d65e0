"""Batches of messages whose tensors are on GPUs: they start together, and one work stands for all of them.

torch starts the messages of ``batch_isend_irecv`` together only in groups of its own class. One after the other, NCCL
sends a large message only once it is received: two ranks that both send first, as pipelines and rings do, would wait
for each other for ever. The first process group with a backend for GPUs therefore installs a function that does so for
sparkdl's groups, too.

Upstream: https://github.com/pytorch/pytorch/pull/186964 and https://github.com/pytorch/pytorch/pull/178906. Versions:
all up to torch 2.13. It can go when the oldest supported torch starts messages together in subclasses of
``ProcessGroup``; the group then says so by ``supports_coalescing``.
"""

from __future__ import annotations

import contextlib
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = "_is_sparkdls"
"""Attribute of the installed function."""


def install_batches() -> None:
    """Let ``torch.distributed.batch_isend_irecv`` start messages on GPUs together in sparkdl's groups; once.

    Only the code of torch's function is replaced, so that it stays the same object for programs that have imported it,
    for pickle, and for torch.compile, which compares it. If another library has wrapped it, the wrapper is wrapped.
    """
    current: Any = dist.batch_isend_irecv
    if hasattr(current, _MARK):
        return
    if isinstance(current, FunctionType) and not current.__code__.co_freevars:
        original = FunctionType(current.__code__, current.__globals__, current.__name__, current.__defaults__)
        setattr(current, _MARK, True)
        current.__globals__["_sparkdl_batch_isend_irecv"] = partial(_batch_isend_irecv, original)
        current.__code__ = _forward.__code__
        return

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        return _batch_isend_irecv(current, p2p_op_list)

    setattr(batch_isend_irecv, _MARK, True)
    dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batch_isend_irecv


def _forward(p2p_op_list):  # type: ignore[no-untyped-def]  # runs among the names of torch's module
    return _sparkdl_batch_isend_irecv(p2p_op_list)  # type: ignore[name-defined]  # noqa: F821


def _batch_isend_irecv(
    original: Callable[..., list[dist.Work]], p2p_op_list: list[dist.P2POp]
) -> list[dist.Work]:
    if isinstance(p2p_op_list, list) and p2p_op_list and isinstance(p2p_op_list[0], dist.P2POp):
        group: Any = p2p_op_list[0].group
        if getattr(group, "accelerator", None) is not None and not all(
            group.serves(operation.tensor) for operation in p2p_op_list
        ):
            distributed_c10d._check_p2p_op_list(p2p_op_list)
            return _start_together(group, p2p_op_list)
    return original(p2p_op_list)


def _start_together(group: Any, operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start all messages of tensors on the GPU as one; return a work for these and one for each other message."""
    device = next(operation.tensor.device for operation in operations if not group.serves(operation.tensor))
    works = []
    group._start_coalescing(device)
    try:
        for operation in operations:
            work = operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
            if group.serves(operation.tensor):
                works.append(work)
    except BaseException:
        with contextlib.suppress(Exception):
            group.accelerator.drop_coalesced(device)
        raise
    together = group._end_coalescing(device)
    return works if together is None else [*works, together]
