"""Attention over a sharded sequence equals attention over the whole sequence, with its gradients, on four ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sparkdl.errors import ParamError
from sparkdl.parallel.attention import all_to_all_attention, ring_attention
from sparkdl.parallel.sequence import positions, shard, unshard
from tests.checks import checks_in, require
from tests.torch.checks import run_checks

HEADS, SIZE = 4, 8
POSITIONS = 32


def draw(key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(5)
    return [
        torch.randn(2, heads, POSITIONS, SIZE, dtype=dtype) for heads in (HEADS, key_heads, key_heads, HEADS)
    ]


def expected(
    tensors: list[Tensor], *, is_causal: bool, documents: Tensor | None, window: int | None
) -> list[Tensor]:
    query, key, value = (tensor.clone().requires_grad_() for tensor in tensors[:3])
    mask = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool)
    mask = (mask.tril() if is_causal else mask)[None, None]
    if window is not None:
        mask = mask.triu(1 - window)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    output.backward(tensors[3])
    return [output.detach(), query.grad, key.grad, value.grad]


def check(
    attention: Callable[..., Tensor],
    *,
    key_heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
    is_causal: bool = True,
    packed: bool = False,
    window: int | None = None,
) -> None:
    group = dist.group.WORLD
    tensors = draw(key_heads, dtype)
    documents = torch.tensor([[0] * 5 + [1] * 20 + [2] * 7, [3] * 31 + [4]]) if packed else None
    query, key, value, grad = (shard(tensor, 2, group) for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    own = None if documents is None else shard(documents, 1, group)
    output = attention(*leaves, group, is_causal=is_causal, documents=own, window=window)
    output.backward(grad)
    found = [output, *(leaf.grad for leaf in leaves)]
    # Blocks are summed in another order, which also depends on the processor: 32 terms of about 1.
    tolerance = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    wanted = expected(tensors, is_causal=is_causal, documents=documents, window=window)
    for part, whole in zip(found, wanted, strict=True):
        assert part.dtype == dtype
        torch.testing.assert_close(unshard(part, 2, group), whole, **tolerance)


def check_ring_attention_equals_attention_over_the_whole_sequence() -> None:
    for is_causal in (False, True):
        check(ring_attention, is_causal=is_causal)


def check_ring_attention_serves_groups_of_queries() -> None:
    for key_heads in (1, 2):
        check(ring_attention, key_heads=key_heads)


def check_ring_attention_keeps_packed_documents_apart() -> None:
    for is_causal in (False, True):
        check(ring_attention, key_heads=2, is_causal=is_causal, packed=True)


def check_ring_attention_sums_bfloat16_in_float32() -> None:
    check(ring_attention, dtype=torch.bfloat16)


def check_sliding_windows_of_any_width_equal_those_over_the_whole_sequence() -> None:
    for attention in (ring_attention, all_to_all_attention):
        for window in (1, 3, 4, 5, 9, 31, 100):
            check(attention, key_heads=2, window=window)
        check(attention, packed=True, window=6)
    with pytest.raises(ParamError, match="need causal attention"):
        check(ring_attention, is_causal=False, window=3)


def check_all_to_all_attention_equals_attention_over_the_whole_sequence() -> None:
    for is_causal in (False, True):
        check(all_to_all_attention, is_causal=is_causal)


def check_all_to_all_attention_serves_groups_of_queries_and_packed_documents() -> None:
    for key_heads in (1, 2):
        for packed in (False, True):
            check(all_to_all_attention, key_heads=key_heads, packed=packed)


def check_positions_of_all_ranks_are_those_of_the_sequence() -> None:
    group = dist.group.WORLD
    own = positions(POSITIONS, group)
    torch.testing.assert_close(unshard(own, 0, group), torch.arange(POSITIONS))
    # Each rank has an early and a late part, so that the causal work, the sum of positions, is equal on all ranks.
    sums = [torch.empty((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, own.sum())
    assert len({int(total) for total in sums}) == 1


def check_sequences_that_the_ranks_do_not_divide_are_refused_with_lengths_that_fit() -> None:
    size = dist.get_world_size()
    with pytest.raises(ParamError, match=f"{4 * size} or {6 * size}"):
        positions(4 * size + 1, dist.group.WORLD)


def check_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    tensor = torch.zeros(1, 3, 4, SIZE)
    with pytest.raises(ParamError, match="3 heads"):
        all_to_all_attention(tensor, tensor, tensor, dist.group.WORLD)


CHECKS = checks_in(__name__)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_checks([__name__], 4)


@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
