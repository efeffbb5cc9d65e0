"""Tensor and sequence parallelism on two ranks: losses and gradients of three steps equal one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import DeepseekV3ForCausalLM, HYV3ForCausalLM, Olmo2ForCausalLM, Qwen2MoeForCausalLM

from sparkdl.errors import ParamError
from sparkdl.networks.language import LanguageNetwork
from sparkdl.parallel.parallelism import Parallelism
from sparkdl.parallel.sharding import blocks_of, recompute_activations
from sparkdl.parallel.tensor.divide import divide
from sparkdl.parallel.tensor.loss import cross_entropy
from tests.checks import chosen, require, slow, with_marks
from tests.parallel.models import (
    SIZES,
    batch,
    decoder,
    latent,
    llama,
    logits_of,
    mixtral,
    optimizer_of,
    reference,
    with_sinks,
)
from tests.torch.checks import run_checks


def check(
    make: Callable[[], nn.Module],
    *,
    sequence: bool = False,
    plan: dict[str, str] | None = None,
    recompute: bool = False,
) -> None:
    layout = Parallelism(tensor=-1).lay_out()
    module = divide(make(), layout.mesh["tensor"], plan, sequence=sequence)
    if recompute:
        recompute_activations(blocks_of(module))
    optimizer = optimizer_of(module)
    for step, (loss_of_one, gradients) in enumerate(reference(make)):
        tokens, labels = batch(step)
        logits = logits_of(module, tokens)
        if logits.shape[-1] < SIZES.vocabulary:
            loss = cross_entropy(logits, labels, layout.group("tensor"))
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert loss.item() == pytest.approx(loss_of_one, rel=1e-5)
        for name, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            torch.testing.assert_close(
                parameter.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-6, msg=name
            )
        optimizer.step()


def check_a_decoder_equals_one_process() -> None:
    check(decoder)


def check_a_decoder_with_divided_sequences_equals_one_process() -> None:
    check(decoder, sequence=True)


def check_a_language_network_with_whole_outputs_divides_sequences() -> None:
    layout = Parallelism(tensor=-1).lay_out()
    tokens, labels = batch(0)
    for make in (decoder, lambda: decoder(replace(SIZES, is_tied=False)), llama):
        whole = LanguageNetwork(make())
        divided = divide(LanguageNetwork(make()), layout.mesh["tensor"], sequence=True, whole_outputs=True)
        for module in (whole, divided):
            F.cross_entropy(module(tokens, torch.zeros_like(tokens)), labels).backward()
        for (name, one), other in zip(whole.named_parameters(), divided.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-6, msg=name)


def check_a_llama_equals_one_process() -> None:
    check(llama)


def check_a_llama_with_divided_sequences_equals_one_process() -> None:
    check(llama, sequence=True)


def check_models_of_hugging_face_with_a_row_of_padding_equal_one_process() -> None:
    for token in (3, 20):  # a token in the vocabulary part of either rank
        check(lambda token=token: llama(pad_token_id=token))


@slow
def check_a_row_of_padding_with_divided_sequences_equals_one_process() -> None:
    check(lambda: llama(pad_token_id=3), sequence=True)


def olmo() -> nn.Module:
    """A model that normalizes queries and keys over all heads together, so that its plan gathers them."""
    return llama(Olmo2ForCausalLM, num_hidden_layers=2)


def check_a_model_that_norms_all_heads_together_equals_one_process() -> None:
    check(olmo)
    check(olmo, sequence=True)


def qwen_of_experts() -> nn.Module:
    """It has an expert for all tokens beside the others, and norms of none."""
    return llama(
        Qwen2MoeForCausalLM,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        num_experts_per_tok=2,
        num_hidden_layers=2,
    )


def hy_of_experts() -> nn.Module:
    """It gives its shared experts tokens without a dimension of the batch."""
    return llama(
        HYV3ForCausalLM,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_shared_experts=1,
        num_hidden_layers=2,
        head_dim=8,
    )


def check_mixtures_of_experts_equal_one_process() -> None:
    check(mixtral, recompute=True)


@slow
def check_further_mixtures_and_implementations_of_experts_equal_one_process() -> None:
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        check(lambda how=implementation: mixtral(implementation=how))
    check(qwen_of_experts)


def of_lonely_experts() -> nn.Module:
    """It gives all tokens to two of four experts, which one rank has. Its plan does not divide attention."""
    module = latent(DeepseekV3ForCausalLM, num_hidden_layers=2, n_group=1, topk_group=1)
    module.set_experts_implementation("eager")
    module.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 9.0]))
    return module


def check_a_rank_whose_experts_get_no_tokens_takes_part() -> None:
    attention = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    attention["kv_a_proj_with_mqa"] = "mla_kv_a_proj"
    plan = {f"model.layers.*.self_attn.{name}": style for name, style in attention.items()}
    check(of_lonely_experts, sequence=True, plan={**of_lonely_experts().tp_plan, **plan})


@slow
def check_a_rank_whose_experts_get_no_tokens_of_whole_sequences_takes_part() -> None:
    for recompute in (False, True):
        check(of_lonely_experts, recompute=recompute)


class OwnConvolution(nn.Module):
    """A block that computes with the weights of its convolution, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(16, 16, 3, groups=16)
        self.inner = nn.Linear(16, 64)
        self.output = nn.Linear(64, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        padded = F.pad(hidden.transpose(1, 2), (2, 0))
        mixed = F.conv1d(padded, self.convolution.weight, self.convolution.bias, groups=16)
        return hidden + self.output(F.gelu(self.inner(mixed.transpose(1, 2))))


def check_blocks_may_read_the_weights_of_their_layers() -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        blocks = nn.Sequential(OwnConvolution(), OwnConvolution())
        return nn.Sequential(nn.Embedding(32, 16), blocks, nn.Linear(16, 32))

    plan = {"1.*.inner": "colwise", "1.*.output": "rowwise"}
    for recompute in (False, True):
        check(make, plan=plan, recompute=recompute)


def check_mixtures_of_experts_with_divided_sequences_equal_one_process() -> None:
    check(hy_of_experts, sequence=True)


@slow
def check_further_mixtures_with_divided_sequences_equal_one_process() -> None:
    check(mixtral, sequence=True)
    check(qwen_of_experts, sequence=True)


def check_latent_attention_equals_one_process() -> None:
    check(latent, recompute=True)


@slow
def check_latent_attention_of_both_kinds_of_queries_equals_one_process() -> None:
    check(latent)
    check(lambda: latent(q_lora_rank=None))  # the plan names the projections of both kinds of queries


def check_latent_attention_with_divided_sequences_equals_one_process() -> None:
    check(latent, sequence=True)


@slow
def check_recomputed_latent_attention_with_divided_sequences_equals_one_process() -> None:
    check(latent, sequence=True, recompute=True)


def check_parameters_of_heads_are_divided() -> None:
    check(with_sinks, recompute=True)
    module = divide(with_sinks(), Parallelism(tensor=-1).lay_out().mesh["tensor"])
    assert len(module.model.layers[0].self_attn.sinks.to_local()) == 4 // dist.get_world_size()


@slow
def check_parameters_of_heads_are_divided_in_further_ways() -> None:
    check(with_sinks)
    check(with_sinks, sequence=True)


def check_latent_attention_without_the_size_of_its_shared_key_is_refused() -> None:
    layout = Parallelism(tensor=-1).lay_out()
    plan = {"0": "mla_kv_a_proj"}
    module = nn.Sequential(nn.Linear(4, 8))
    with pytest.raises(ParamError, match="'0' .* Give the module an attribute qk_rope_head_dim"):
        divide(module, layout.mesh["tensor"], plan)
    module.qk_rope_head_dim = 8
    with pytest.raises(ParamError, match="'0' has 8 output .* qk_rope_head_dim = 8"):
        divide(module, layout.mesh["tensor"], plan)
    with pytest.raises(ParamError, match=r"takes a torch\.nn\.Linear, but it is a Embedding"):
        divide(nn.Sequential(nn.Embedding(4, 4)), layout.mesh["tensor"], plan)


class SharedKey(nn.Module):
    """Heads of 4 features that a key, the last 4 features of ``latent``, multiplies."""

    def __init__(self, size_of_key: int) -> None:
        super().__init__()
        self.qk_rope_head_dim = size_of_key
        self.latent = nn.Linear(16, 12)
        self.heads = nn.Linear(8, 16)
        self.output = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        features, key = self.latent(hidden).split([8, 4], dim=-1)
        heads = self.heads(features).unflatten(-1, (-1, 4)) * key.unsqueeze(-2)
        return self.output(heads.flatten(-2))


def check_a_shared_key_of_more_features_than_the_model_says_is_refused() -> None:
    def make(size_of_key: int) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(32, 16), SharedKey(size_of_key), nn.Linear(16, 32))

    plan = {"1.latent": "mla_kv_a_proj", "1.heads": "colwise", "1.output": "rowwise"}
    check(lambda: make(4), plan=plan)
    module = make(2)
    module[0].weight.requires_grad_(False)
    divide(module, Parallelism(tensor=-1).lay_out().mesh["tensor"], plan)
    loss = module(batch(0)[0]).square().sum()
    with pytest.raises(
        ParamError, match=r"'1\.latent\.(weight|bias)' whole, and the ranks computed different"
    ):
        loss.backward()


def check_packed_layers_and_parameters_that_cannot_be_divided_are_refused() -> None:
    layout = Parallelism(tensor=-1).lay_out()
    for plan, words in (
        ({"1.latent": "packed_colwise"}, "'1.latent' in the style 'packed_colwise'.* Make one layer of each"),
        ({"1.scale": "rowwise"}, r"parameter '1.scale' of shape \(3,\) in the style 'rowwise'"),
        ({"1.scale": "colwise"}, "'1.scale' has the length 3, which 2 tensor-parallel ranks cannot divide"),
        ({"1.latent.weight": "colwise"}, "parameter of a Linear. Name the layer, '1.latent', instead"),
        ({"1.skale": "local_params"}, "names the module '1.skale', which"),
    ):
        module = nn.Sequential(nn.Embedding(32, 16), SharedKey(4))
        module[1].scale = nn.Parameter(torch.ones(3))
        with pytest.raises(ParamError, match=words):
            divide(module, layout.mesh["tensor"], plan)
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def check_attention_that_is_not_divided_is_refused_with_divided_sequences() -> None:
    layout = Parallelism(tensor=-1).lay_out()
    plan = {name: style for name, style in decoder().tensor_plan.items() if "attention" not in name}
    check(decoder, plan=plan)
    divided = divide(decoder(), layout.mesh["tensor"], plan, sequence=True)
    with pytest.raises(ParamError, match="'blocks.0' computes another result: .* works on several positions"):
        divided(batch(0)[0])
    plan = {f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("up", "gate")}
    plan["model.layers.*.mlp.down_proj"] = "rowwise"
    masked = divide(llama(), layout.mesh["tensor"], plan, sequence=True)
    with pytest.raises(ParamError, match="'model.layers.0' computes another result"):
        masked(batch(0)[0])


def check_a_mixture_of_an_odd_number_of_experts_is_refused() -> None:
    layout = Parallelism(tensor=-1).lay_out()
    with pytest.raises(
        ParamError, match=r"layers.0.mlp.experts' has 3 experts, which 2 .* ranks cannot divide"
    ):
        divide(mixtral(num_experts=3), layout.mesh["tensor"])
    plan = {"model.layers.*.mlp.gat_proj": "colwise", "model.layers.*.mlp.experts": "experts"}
    with pytest.raises(ParamError, match="mlp.gat_proj', which MixtralForCausalLM does not have"):
        divide(mixtral(), layout.mesh["tensor"], plan)
    with pytest.raises(ParamError, match="takes a module with num_experts, .* Linear is none"):
        divide(nn.Sequential(nn.Linear(4, 4)), layout.mesh["tensor"], {"0": "experts"})


def check_a_plan_of_the_users_with_biases_equals_one_process() -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Embedding(32, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 64),
            nn.GELU(),
            nn.Linear(64, 16),
            nn.Linear(16, 32),
        )

    check(make, plan={"2": "colwise", "4": "rowwise", "5": "colwise_gather_output"})


class Scaled(nn.Module):
    """A block that has its own parameter in addition to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.inner = nn.Linear(16, 64)
        self.output = nn.Linear(64, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.output(F.gelu(self.inner(hidden)))


def check_blocks_with_parameters_of_their_own_are_computed_again_alike() -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(32, 16), nn.Sequential(Scaled(), Scaled()), nn.Linear(16, 32))

    check(make, plan={"1.*.inner": "colwise", "1.*.output": "rowwise"}, recompute=True)


class NormedHidden(nn.Module):
    """A norm of groups of features between divided layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 64)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(64, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(self.inner(hidden).unflatten(-1, (-1, 8))).flatten(-2))


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(32, 16), NormedHidden(), nn.Linear(16, 32))


def check_a_layer_between_divided_ones_that_the_plan_leaves_out_is_refused() -> None:
    plan = {"1.inner": "colwise", "1.output": "rowwise"}
    with pytest.raises(ParamError, match=r"'1\.norm\.(weight|bias)' whole.*'replicated'"):
        check(normed, plan=plan)
    check(normed, plan={**plan, "1.norm": "replicated"})


class FixedHeads(nn.Module):
    """Attention whose forward method has the number of heads as a constant."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        if is_fused:
            self.all = nn.Linear(16, 48)
        else:
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.output = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_fused:
            query, key, value = (
                projection.unflatten(-1, (-1, 4)).transpose(1, 2)
                for projection in self.all(hidden).chunk(3, -1)
            )
        else:
            query, key, value = (
                layer(hidden).unflatten(-1, (4, -1)).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


def check_layers_that_compute_something_else_when_divided_are_refused() -> None:
    mesh = Parallelism(tensor=-1).lay_out().mesh["tensor"]
    for is_fused, plan in (
        (False, dict.fromkeys(("1.query", "1.key", "1.value"), "colwise")),
        (True, {"1.all": "colwise"}),
    ):
        for sequence in (False, True):
            torch.manual_seed(3)
            blocks = [FixedHeads(is_fused=is_fused) for _ in range(2)]
            whole = nn.Sequential(nn.Embedding(32, 16), *blocks)
            if sequence:
                whole = nn.Sequential(nn.Embedding(32, 16), nn.ModuleList(blocks))
                whole.forward = lambda tokens, module=whole: module[1][1](module[1][0](module[0](tokens)))
            names = {f"1.*.{name[2:]}" if sequence else name: style for name, style in plan.items()}
            names["1.*.output" if sequence else "1.output"] = "rowwise"
            module = divide(whole, mesh, names, sequence=sequence)
            with pytest.raises(ParamError, match=r"'1(\.0)?' computes another result\. Its forward"):
                module(batch(0)[0])


def check_ranks_of_a_group_with_other_rows_are_refused() -> None:
    module = divide(decoder(), Parallelism(tensor=-1).lay_out().mesh["tensor"])
    tokens, _ = batch(dist.get_rank())
    with pytest.raises(ParamError, match="different inputs .*the same rows"):
        module(tokens)


def check_each_rank_has_its_part_of_the_weights() -> None:
    whole = decoder()
    layout = Parallelism(tensor=-1).lay_out()
    module = divide(decoder(), layout.mesh["tensor"])
    weight = module.blocks[0].attention.query.weight
    assert weight.to_local().shape == (SIZES.width // dist.get_world_size(), SIZES.width)
    torch.testing.assert_close(weight.full_tensor(), whole.blocks[0].attention.query.weight)
    assert module.head.weight is module.embedding.weight


def check_labels_that_are_no_class_are_refused() -> None:
    group = Parallelism(tensor=-1).lay_out().group("tensor")
    for label in (32, -5):
        with pytest.raises(ParamError, match=f"label {label} is neither from 0 to 31 nor"):
            cross_entropy(torch.randn(2, 32 // dist.get_world_size()), torch.tensor([1, label]), group)


def check_labels_that_do_not_count_are_left_out_of_the_divided_loss() -> None:
    layout = Parallelism(tensor=-1).lay_out()
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = torch.randn(6, 8 * size, requires_grad=True)
    labels = torch.tensor([0, 8 * size - 1, -100, 3, -100, 8])
    expected = F.cross_entropy(whole, labels)
    expected.backward()
    part = whole.detach().chunk(size, 1)[rank].requires_grad_()
    loss = cross_entropy(part, labels, layout.group("tensor"))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(part.grad, whole.grad.chunk(size, 1)[rank])


def check_a_plan_that_does_not_fit_names_the_module_and_changes_nothing() -> None:
    layout = Parallelism(tensor=-1).lay_out()
    module = decoder()
    for plan, words in (
        ({"blocks.*.attention.querry": "colwise"}, "querry"),
        ({"blocks.*.attention": "colwise"}, "GroupedAttention"),
        ({"norm": "rowwise"}, "RMSNorm"),
        ({"head": "diagonal"}, "diagonal"),
    ):
        with pytest.raises(ParamError, match=words):
            divide(module, layout.mesh["tensor"], plan)
    odd = nn.Sequential(nn.Linear(8, 7))
    with pytest.raises(ParamError, match="'0' has 7 output features"):
        divide(odd, layout.mesh["tensor"], {"0": "colwise"})
    with pytest.raises(ParamError, match="num_key_value_heads = 1"):
        divide(llama(num_key_value_heads=1), layout.mesh["tensor"])
    with pytest.raises(
        ParamError, match="num_key_value_heads = 1.*'decoder.model.layers.0.self_attn.q_proj'"
    ):
        divide(LanguageNetwork(llama(num_key_value_heads=1)), layout.mesh["tensor"])
    with pytest.raises(ParamError, match="key_heads = 1"):
        divide(decoder(replace(SIZES, key_heads=1)), layout.mesh["tensor"])
    with pytest.raises(ParamError, match="max_norm=1.0"):
        divide(
            nn.Sequential(nn.Embedding(8, 8, max_norm=1.0)), layout.mesh["tensor"], {"0": "embedding_rowwise"}
        )
    tied = decoder()
    with pytest.raises(ParamError, match="'embedding.weight' and 'head.weight' are one parameter"):
        divide(tied, layout.mesh["tensor"], {"head": "colwise"})
    assert not any(isinstance(parameter, DTensor) for parameter in tied.parameters())
    with pytest.raises(ParamError, match="Sequential carries no plan"):
        divide(odd, layout.mesh["tensor"])
    assert not any(isinstance(parameter, DTensor) for parameter in (*module.parameters(), *odd.parameters()))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_checks([__name__], 2, names=chosen(request.session.items, __name__))


@pytest.mark.parametrize("check", with_marks(__name__))
def test_check_holds_on_two_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
