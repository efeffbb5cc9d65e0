"""Context parallelism, alone and with others, on four ranks: losses and gradients of three steps equal one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma2ForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

from sparkdl.errors import ParamError
from sparkdl.networks.decoder import Decoder
from sparkdl.parallel import sequence
from sparkdl.parallel.context import WholeSequences, share_sequences
from sparkdl.parallel.parallelism import Parallelism
from sparkdl.parallel.sharding import blocks_of, recompute_activations, shard
from sparkdl.parallel.tensor.divide import divide
from sparkdl.parallel.tensor.loss import cross_entropy
from tests.checks import chosen, require, slow, with_marks
from tests.parallel.models import POSITIONS, SIZES, batch, decoder, llama, logits_of, optimizer_of, reference
from tests.torch.checks import run_checks


class Plain(nn.Module):
    """A model with its own attention layers that call torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.inner(hidden).unflatten(-1, (4, 12)).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + attended.transpose(1, 2).flatten(2)


def plain() -> nn.Module:
    torch.manual_seed(2)
    return Plain()


def check(
    parallelism: Parallelism,
    make: Callable[[], nn.Module] = decoder,
    *,
    method: str = "ring",
    recompute: bool = False,
) -> None:
    layout = parallelism.lay_out()
    module = make()
    if layout.size("tensor") > 1:
        divide(module, layout.mesh["tensor"])
    group = layout.group("context")
    share_sequences(module, group, method=method)
    if recompute:
        recompute_activations(blocks_of(module))
    shard(module, layout)
    optimizer = optimizer_of(module)
    positions = sequence.positions(POSITIONS, group)
    extra = {Decoder: {"positions": positions}, Plain: {}}.get(
        type(make()), {"position_ids": positions[None], "use_cache": False}
    )
    number, readers = layout.row_reader
    for step, (loss_of_one, gradients) in enumerate(reference(make)):
        tokens, labels = (sequence.shard(part.chunk(readers)[number], 1, group) for part in batch(step))
        logits = logits_of(module, tokens, **extra)
        loss = (
            cross_entropy(logits, labels, layout.group("tensor"))
            if logits.shape[-1] < SIZES.vocabulary
            else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=layout.group("data", "shard", "context"))
        assert total.item() / layout.size("data", "shard", "context") == pytest.approx(loss_of_one, rel=1e-5)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                parameter.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-6, msg=name
            )
        optimizer.step()


def check_both_methods_equal_one_process() -> None:
    check(Parallelism(context=4))
    check(Parallelism(context=4), method="all-to-all", recompute=True)


def check_a_model_that_calls_torch_itself_equals_one_process() -> None:
    check(Parallelism(context=2), plain, recompute=True)


def check_a_llama_equals_one_process() -> None:
    check(Parallelism(context=2, shard=2), llama)


def check_context_and_replicas_equal_one_process() -> None:
    check(Parallelism(context=2, data=2), method="all-to-all")


def check_masks_and_unknown_methods_are_refused() -> None:
    group = dist.group.WORLD
    with pytest.raises(ParamError, match="'ring' or 'all-to-all'"):
        share_sequences(decoder(), group, method="star")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    module = share_sequences(llama(), group)
    own = {"position_ids": sequence.positions(32, group)[None], "use_cache": False}
    with pytest.raises(ParamError, match="no mask"):
        module(tokens, attention_mask=torch.ones(1, 8), **own)
    assert type(module(tokens, **own).logits) is Tensor  # the ranks of the group are still in step


def mistral() -> nn.Module:
    return llama(MistralForCausalLM, sliding_window=5)


def qwen() -> nn.Module:
    """A Qwen with two layers that attend to whole sequences and two that attend to a window."""
    return llama(Qwen2ForCausalLM, use_sliding_window=True, max_window_layers=2, sliding_window=5)


def check_models_with_sliding_windows_equal_one_process() -> None:
    check(Parallelism(context=2, data=2), qwen, method="all-to-all", recompute=True)


@slow  # test_attention.py has windows of any width in a ring
def check_a_model_with_sliding_windows_in_a_ring_equals_one_process() -> None:
    check(Parallelism(context=4), mistral)


def check_a_llama_keeps_packed_documents_apart() -> None:
    group = dist.group.WORLD
    documents = torch.tensor([[0] * 5 + [1] * 11, [2] * 15 + [3]])
    tokens, _ = (part[:2] for part in batch(0))
    mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    wanted = llama()(tokens, attention_mask=mask, use_cache=False).logits
    module = share_sequences(llama(), group)
    own, parts = (sequence.shard(whole, 1, group) for whole in (tokens, documents))
    positions = sequence.positions(POSITIONS, group)[None]
    found = module(own, position_ids=positions, documents=parts, use_cache=False).logits
    torch.testing.assert_close(sequence.unshard(found, 1, group), wanted, rtol=1e-4, atol=1e-5)
    copy.deepcopy(module)
    with pytest.raises(ParamError, match="position_ids that are not those"):
        module(own, position_ids=torch.arange(len(own[0]))[None], use_cache=False)


class Positioned(Plain):
    """A user's model that takes the numbers of positions, written for whole sequences."""

    def __init__(self, *, is_mean: bool = False) -> None:
        super().__init__()
        self.is_mean = is_mean

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        hidden = self.embedding(tokens) + positions[:, None] / 16
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1) if self.is_mean else hidden)


def check_models_of_users_take_whole_sequences_and_return_a_value_of_each_position() -> None:
    group = dist.group.WORLD
    tokens, _ = batch(0)
    torch.manual_seed(2)
    whole = Positioned()
    wanted = whole(tokens)
    found = WholeSequences(share_sequences(copy.deepcopy(whole), group), group)(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    averaged = WholeSequences(share_sequences(Positioned(is_mean=True), group), group)
    with pytest.raises(ParamError, match=r"shape \(1, 32\) for 4 positions"):
        averaged(tokens)


class Mixing(Positioned):
    """A model with another layer that works on several positions, beside attention that can be shared."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.other = nn.MultiheadAttention(self.head.in_features, 2, batch_first=True)
        self.embedding.register_forward_hook(self.mix)

    def mix(self, _module: nn.Module, _args: object, hidden: Tensor) -> Tensor:
        if self.kind == "attention of torch":
            return hidden + self.other(hidden, hidden, hidden, need_weights=False)[0]
        if self.kind == "attention by hand":
            return hidden + (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden
        return hidden + hidden.cumsum(1)


def check_layers_that_work_on_several_positions_beside_attention_are_refused() -> None:
    group, (tokens, _) = dist.group.WORLD, batch(0)
    for kind in ("attention of torch", "attention by hand", "sum"):
        torch.manual_seed(2)
        shared = WholeSequences(share_sequences(Mixing(kind), group), group)
        with pytest.raises(ParamError, match="computes another result when ranks share its sequences"):
            shared(tokens)


class Averaged(nn.Module):
    """A model that mixes positions without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(tokens).cumsum(1) / (positions[:, None] + 1)


def check_models_that_ranks_cannot_share_sequences_of_are_refused() -> None:
    group = dist.group.WORLD
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    positions = sequence.positions(POSITIONS, group)
    with pytest.raises(ParamError, match="Averaged computes no attention"):
        share_sequences(Averaged(), group)(tokens, positions)
    for module in (decoder(), llama()):
        with pytest.raises(ParamError, match="got no position"):
            share_sequences(module, group)(tokens)
    with pytest.raises(ParamError, match="type 'linear_attention'"):
        share_sequences(llama(layer_types=["linear_attention"] * 2 + ["full_attention"] * 2), group)
    capped = llama(Gemma2ForCausalLM, head_dim=8, attn_implementation="eager")
    with pytest.raises(ParamError, match="softcap"):
        share_sequences(capped, group)(tokens, position_ids=positions[None], use_cache=False)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_checks([__name__], 4, names=chosen(request.session.items, __name__))


@pytest.mark.parametrize("check", with_marks(__name__))
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
