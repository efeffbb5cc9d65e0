"""Attention over a sequence that is sharded across the ranks of a group: ring attention and all-to-all attention.

Every rank holds the queries, keys and values of its own positions, two chunks of the sequence (see
:mod:`sparkdl.parallel.sequence`). :func:`ring_attention` passes keys and values from rank to rank and never holds more
than two ranks' share of them; :func:`all_to_all_attention` exchanges positions for heads, computes ordinary attention
of some heads on whole sequences, and exchanges back. Both compute the same as
:func:`torch.nn.functional.scaled_dot_product_attention` on the whole sequence, up to rounding.

Sources: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023);
W. Brandon et al., "Striped Attention" (2023), for why causal attention needs balanced shards; S. A. Jacobs et al.,
"DeepSpeed Ulysses" (2023); T. Dao, "FlashAttention-2" (2023), for merging blocks by their logsumexp and for the
backward pass of a block.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sparkdl.errors import ParamError
from sparkdl.parallel.collectives import Paired, apply
from sparkdl.parallel.sequence import chunks_of, from_chunks, to_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from this rank's positions to the positions of all ranks; keys and values travel around the ring.

    While a rank computes with one block of keys and values, it receives the next block. With ``is_causal`` every rank
    has the same work in every step, as each holds an early and a late chunk of the sequence.

    Args:
        query: queries of this rank's positions, ``(batch, heads, positions, head size)``.
        key: keys of this rank's positions, ``(batch, key heads, positions, head size)``; the number of key heads
            divides the number of heads, and each key head serves a group of consecutive heads (grouped queries).
        value: values of this rank's positions, in the shape of ``key``.
        group: process group of the ranks that share the sequence; a rank's number in it determines its chunks.
        is_causal: whether a position attends only to itself and to earlier positions.
        scale: factor of the dot products; ``1 / sqrt(head size)`` if None.
        documents: document number of each position, ``(batch, positions)`` integers; a position attends only to
            positions with the same number, as packed sequences need it. None for one document.
        window: width of a sliding window: a position attends only to itself and to the ``window - 1`` positions before
            it; needs ``is_causal``. None for all earlier positions.

    Returns:
        ``(batch, heads, positions, head size)``, in the dtype of ``query``.

    Raises:
        ParamError: if the shapes do not match, or ``window`` is set without ``is_causal``.
    """
    _check_shapes(query, key, value)
    if is_causal and query.shape[2] % 2:
        raise ParamError(
            f"Causal ring attention needs an even number of positions per rank, got {query.shape[2]}: the sequence "
            f"must be a multiple of {2 * dist.get_world_size(group)} positions. Pad it."
        )
    if documents is not None and documents.shape != (query.shape[0], query.shape[2]):
        raise ParamError(
            f"documents must have the shape (batch, positions) = {(query.shape[0], query.shape[2])}, got "
            f"{tuple(documents.shape)}."
        )
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    window = _narrow_window(window, query.shape[2] * dist.get_world_size(group), is_causal)
    return apply(_RingAttention, query, key, value, documents, group, is_causal, scale, window)


def all_to_all_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from this rank's positions to all ranks' positions; each rank computes some heads of the whole sequence.

    Needs four all-to-all exchanges in place of a ring: in each, a rank sends ``1 / world_size`` of a tensor to every
    rank. The number of heads must be a multiple of the group's size; key heads are repeated if their number is not.
    Arguments, result and errors are those of :func:`ring_attention`.
    """
    _check_shapes(query, key, value)
    size = dist.get_world_size(group)
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % size:
        raise ParamError(
            f"All-to-all attention divides {heads} heads among {size} ranks, which leaves a remainder. Use a context "
            "size that divides the number of heads, or ring attention."
        )
    repeats = size // math.gcd(key_heads, size)
    if heads % (key_heads * repeats):
        raise ParamError(
            f"All-to-all attention cannot divide {key_heads} key heads for {heads} heads among {size} ranks. Use ring "
            "attention."
        )
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    query, key, value = (apply(Paired, x, _to_heads, _to_positions, group) for x in (query, key, value))
    all_documents = None
    if documents is not None:
        gathered = [torch.empty_like(documents) for _ in range(size)]
        dist.all_gather(gathered, documents.contiguous(), group=group)
        all_documents = from_chunks(torch.stack(gathered), 1)
    output = whole_attention(
        query, key, value, is_causal=is_causal, scale=scale, documents=all_documents, window=window
    )
    return apply(Paired, output, _to_positions, _to_heads, group)


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend over whole sequences on this rank alone; arguments and result are those of :func:`ring_attention`."""
    length = query.shape[2]
    window = _narrow_window(window, length, is_causal)
    mask = None
    if documents is not None or window is not None:
        positions = torch.arange(length, dtype=torch.int32, device=query.device)
        mask = _pairs(documents, documents, positions[:, None], positions, is_causal=is_causal, window=window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _narrow_window(window: int | None, length: int, is_causal: bool) -> int | None:
    """The window in positions; None if it covers the whole sequence."""
    if window is None:
        return None
    if not is_causal or window < 1:
        raise ParamError(
            f"Sliding windows need causal attention and at least one position, got window={window}, "
            f"is_causal={is_causal}."
        )
    return window if window < length else None


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ParamError(
            "query, key and value must have the shape (batch, heads, positions, head size), and key and value the same "
            f"shape; got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    batch, heads, positions, size = query.shape
    if (key.shape[0], key.shape[2], key.shape[3]) != (batch, positions, size) or heads % key.shape[1]:
        raise ParamError(
            f"key has the shape {tuple(key.shape)}, which does not fit to query's {tuple(query.shape)}: batch, "
            "positions and head size must be equal, and the number of its heads must divide that of query's."
        )


class _RingAttention(torch.autograd.Function):
    """Ring attention with gradients: keys and values travel in the forward pass, in the backward pass gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        group: dist.ProcessGroup,
        is_causal: bool,
        scale: float,
        window: int | None,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        ring = _RingExchange(group)
        batch, heads, positions, size = query.shape
        # In the memory layout of torch's attention, so that the next layer joins the heads without a copy.
        accumulated = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros((batch, positions, heads, size), dtype=accumulated, device=query.device)
        output = output.transpose(1, 2)
        logsumexp = output.new_full((batch, heads, positions), -math.inf)
        block = [key, value] if documents is None else [key, value, documents.contiguous()]
        for step in range(ring.size):
            transfer = ring.pass_on(block) if step + 1 < ring.size else None
            source = ring.source(step)
            for rows, columns, diagonal in _visible(ring, source, query.shape[2], is_causal, window):
                part, found_lse = _attend(
                    query[:, :, rows],
                    block[0][:, :, columns],
                    block[1][:, :, columns],
                    scale=scale,
                    is_causal=diagonal,
                    mask=_mask(documents, block, ring, source, rows, columns, diagonal, window),
                )
                _merge(output[:, :, rows], logsumexp[:, :, rows], part, found_lse)
            if transfer is not None:
                block = transfer.wait()
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, documents, result, logsumexp)
        ctx.group, ctx.is_causal, ctx.scale, ctx.window = group, is_causal, scale, window
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        query, key, value, documents, output, logsumexp = ctx.saved_tensors
        grad_output = grad_outputs[0].contiguous()
        ring = _RingExchange(ctx.group)
        accumulated = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.zeros(query.shape, dtype=accumulated, device=query.device)
        block = [key, value] if documents is None else [key, value, documents.contiguous()]
        gradients = [torch.zeros(key.shape, dtype=accumulated, device=key.device) for _ in range(2)]
        arriving = None
        for step in range(ring.size):
            transfer = ring.pass_on(block) if step + 1 < ring.size else None
            parts, source = [], ring.source(step)
            for rows, columns, diagonal in _visible(ring, source, query.shape[2], ctx.is_causal, ctx.window):
                found_query, found_key, found_value = _attend_backward(
                    grad_output[:, :, rows],
                    query[:, :, rows],
                    block[0][:, :, columns],
                    block[1][:, :, columns],
                    output[:, :, rows],
                    logsumexp[:, :, rows],
                    scale=ctx.scale,
                    is_causal=diagonal,
                    mask=_mask(documents, block, ring, source, rows, columns, diagonal, ctx.window),
                )
                grad_query[:, :, rows] += found_query
                parts.append((columns, found_key, found_value))
            # The gradients of this block arrived from the previous rank while this rank computed its part of them.
            if arriving is not None:
                gradients = arriving.wait()
            for columns, found_key, found_value in parts:
                gradients[0][:, :, columns] += found_key
                gradients[1][:, :, columns] += found_value
            if ring.size > 1:
                arriving = ring.pass_on(gradients)
            if transfer is not None:
                block = transfer.wait()
        if arriving is not None:
            gradients = arriving.wait()
        return (
            grad_query.to(query.dtype),
            gradients[0].to(key.dtype),
            gradients[1].to(value.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _visible(
    ring: _RingExchange, source: int, positions: int, is_causal: bool, window: int | None
) -> Sequence[tuple[slice, slice, bool]]:
    """Blocks of this rank's queries and another rank's keys that attend to each other: rows, columns, is causal.

    The early chunk of an earlier rank lies before both chunks of this rank, and its late chunk after both; both chunks
    of a later rank lie between the chunks of this rank. In either case half of all pairs of positions attend. Pairs of
    chunks that are farther apart than the window are left out.
    """
    both, half = slice(0, positions), positions // 2
    early, late = slice(0, half), slice(half, positions)
    if not is_causal:
        return [(both, both, False)]
    if window is None:
        if source == ring.rank:
            return [(both, both, True)]
        if source < ring.rank:
            return [(both, early, False)]
        return [(late, both, False)]
    mine, others = (chunks_of(rank, ring.size) for rank in (ring.rank, source))
    return [
        (rows, columns, source == ring.rank and rows is columns)
        for row, rows in zip(mine, (early, late), strict=True)
        for column, columns in zip(others, (early, late), strict=True)
        if row >= column and (row - column - 1) * half + 1 < window
    ]


def _mask(
    documents: Tensor | None,
    block: Sequence[Tensor],
    ring: _RingExchange,
    source: int,
    rows: slice,
    columns: slice,
    diagonal: bool,
    window: int | None,
) -> Tensor | None:
    """Mask of the pairs of a block that attend to each other; None if only the order of positions decides."""
    if documents is None and window is None:
        return None
    queries = keys = None
    if diagonal or window is not None:
        queries, keys = (ring.positions(rank, block[0]) for rank in (ring.rank, source))
        queries, keys = queries[rows, None], keys[columns]
    if documents is None:
        return _pairs(None, None, queries, keys, is_causal=diagonal, window=window)
    return _pairs(documents[:, rows], block[2][:, columns], queries, keys, is_causal=diagonal, window=window)


def _pairs(
    documents: Tensor | None,
    others: Tensor | None,
    queries: Tensor | None,
    keys: Tensor | None,
    *,
    is_causal: bool,
    window: int | None,
) -> Tensor:
    """Mask of the queries and keys that attend to each other, ``(1 or batch, 1, queries, keys)``.

    Args:
        documents: document numbers of the queries, ``(batch, queries)``; None if documents do not matter.
        others: document numbers of the keys, ``(batch, keys)``; None if documents do not matter.
        queries: positions of the queries, ``(queries, 1)``; None if positions do not matter.
        keys: positions of the keys, ``(keys,)``; None if positions do not matter.
        is_causal: whether keys after a query are left out.
        window: see :func:`ring_attention`.
    """
    masks = []
    if queries is not None and keys is not None:
        if is_causal:
            masks.append((queries >= keys)[None, None])
        if window is not None:
            masks.append((queries < keys + window)[None, None])
    if documents is not None and others is not None:
        masks.append(documents[:, None, :, None] == others[:, None, None, :])
    return functools.reduce(torch.logical_and, masks)


def _merge(output: Tensor, logsumexp: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Merge the attention over one more block of keys, in place; each part is weighted by its share of exponentials."""
    joined = torch.logaddexp(logsumexp, found_lse)
    finite = torch.where(joined == -math.inf, 0.0, joined)  # a query that has attended to no key yet
    output.mul_(torch.exp(logsumexp - finite).unsqueeze(-1))
    output.addcmul_(found.to(output.dtype), torch.exp(found_lse - finite).unsqueeze(-1))
    logsumexp.copy_(joined)


class _RingExchange:
    """Sends tensors to the next rank of a group while tensors of the previous rank arrive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def source(self, step: int) -> int:
        """The rank whose block this rank holds in a step."""
        return (self.rank - step) % self.size

    def positions(self, rank: int, part: Tensor) -> Tensor:
        """Return the positions, in the whole sequence, that a rank's part holds; one-dimensional.

        Args:
            rank: rank of the group.
            part: tensor of the rank's positions, of shape ``(batch, heads, positions, head size)``.
        """
        half = part.shape[2] // 2
        offsets = torch.arange(half, device=part.device)
        return torch.cat([offsets + chunk * half for chunk in chunks_of(rank, self.size)])

    def pass_on(self, tensors: Sequence[Tensor]) -> _Transfer:
        """Start to send tensors to the next rank and to receive tensors of the same shapes from the previous rank."""
        received = [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, self._next, self._group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, self._previous, self._group) for tensor in received]
        return _Transfer(dist.batch_isend_irecv(operations), list(tensors), received)


class _Transfer:
    """A transfer in progress; keeps the tensors to send alive until they are sent."""

    def __init__(self, works: Sequence[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self._works = works
        self._sent = sent
        self._received = received

    def wait(self) -> list[Tensor]:
        """Wait until all tensors are sent and received; return the received ones."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


def _to_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange ``(batch, heads, positions of a rank, size)`` for ``(batch, heads of a rank, all positions, size)``."""
    size = dist.get_world_size(group)
    batch, heads, positions, features = tensor.shape
    parts = tensor.view(batch, size, heads // size, positions, features).transpose(0, 1).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return from_chunks(received, 2)


def _to_positions(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of :func:`_to_heads`."""
    size = dist.get_world_size(group)
    parts = to_chunks(tensor, 2, size).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    _, batch, heads, positions, features = received.shape
    return received.transpose(0, 1).reshape(batch, size * heads, positions, features)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys, and its logsumexp, which is ``-inf`` where a query attends to no key."""
    key, value = _expand_heads(key, query.shape[1]), _expand_heads(value, query.shape[1])
    bias = _bias(mask, query)
    aten = torch.ops.aten
    if query.device.type == "cpu":
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal and mask is None, attn_mask=bias, scale=scale
        )
    elif mask is None and query.dtype in (torch.float16, torch.bfloat16):
        output, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        output, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, is_causal and mask is None, scale=scale
        )
        logsumexp = logsumexp[:, :, : query.shape[2]]  # padded to the kernel's alignment
    if mask is not None:
        logsumexp = torch.where(mask.any(-1).expand_as(logsumexp), logsumexp, -math.inf)
        output = torch.where((logsumexp == -math.inf).unsqueeze(-1), 0.0, output)
    return output, logsumexp


def _attend_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    scale: float,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's part of the gradients, from the output and the logsumexp over all blocks."""
    key_heads = key.shape[1]
    key, value = _expand_heads(key, query.shape[1]), _expand_heads(value, query.shape[1])
    bias = _bias(mask, query)
    # A query that attends to no key in any block: exp(-inf - 0) is 0, as it should be; -inf - -inf would be NaN.
    logsumexp = torch.where(logsumexp == -math.inf, 0.0, logsumexp).contiguous()
    grad_output, output = grad_output.contiguous(), output.contiguous()
    aten = torch.ops.aten
    if query.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output,
            query,
            key,
            value,
            output,
            logsumexp,
            0.0,
            is_causal and mask is None,
            attn_mask=bias,
            scale=scale,
        )
    elif mask is None and query.dtype in (torch.float16, torch.bfloat16):
        seed = torch.empty((), dtype=torch.int64, device=query.device)  # of dropout, which is off
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_output, query, key, value, output, logsumexp, None, None, query.shape[2], key.shape[2], 0.0, is_causal,
            seed, seed, scale=scale,
        )  # fmt: skip
    else:
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad_output, query, key, value, bias, output, F.pad(logsumexp, (0, -query.shape[2] % 32)), seed, seed, 0.0,
            [True, True, True, False], is_causal and mask is None, scale=scale,
        )  # fmt: skip
    grad_query, grad_key, grad_value = grads[:3]
    return grad_query, _sum_heads(grad_key, key_heads), _sum_heads(grad_value, key_heads)


def _expand_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat each key head for the heads that it serves."""
    repeats = heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _sum_heads(gradient: Tensor, key_heads: int) -> Tensor:
    """The backward pass of :func:`_expand_heads`."""
    if gradient.shape[1] == key_heads:
        return gradient
    batch, heads, positions, size = gradient.shape
    return gradient.view(batch, key_heads, heads // key_heads, positions, size).sum(2)


_BIAS_ALIGNMENT = 16
"""The rows of a bias begin at multiples of this many elements: a requirement of torch's kernels for GPUs."""


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    keys = mask.shape[-1]
    is_on_cpu = query.device.type == "cpu"
    width = keys if is_on_cpu else -(-keys // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    bias = torch.zeros((*mask.shape[:-1], width), dtype=query.dtype, device=query.device)[..., :keys]
    bias.masked_fill_(~mask, -math.inf)
    return bias if is_on_cpu else bias.expand(*query.shape[:2], -1, -1)
