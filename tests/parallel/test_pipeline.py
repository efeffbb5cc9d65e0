"""Pipeline schedules, alone and with others, on four ranks: losses and gradients equal one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GraniteForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from sparkdl.errors import ParamError
from sparkdl.networks.language import LanguageNetwork
from sparkdl.parallel.parallelism import SCHEDULES, Parallelism, RankLayout
from sparkdl.parallel.parallelize import parallelize
from sparkdl.parallel.pipeline.cut import cut
from sparkdl.parallel.pipeline.parts import costs_by_time
from sparkdl.parallel.pipeline.pipeline import Pipeline
from sparkdl.parallel.sharding import (
    average_gradients,
    blocks_of,
    clip_gradients,
    recompute_activations,
    shard,
)
from sparkdl.parallel.tensor.divide import divide
from sparkdl.parallel.tensor.loss import cross_entropy
from tests.checks import chosen, require, slow, with_marks
from tests.parallel.models import SIZES, batch, decoder, llama, mixtral, optimizer_of, reference
from tests.torch.checks import run_checks


def untied() -> nn.Module:
    return decoder(replace(SIZES, is_tied=False, layers=8))


def tied() -> nn.Module:
    return decoder(replace(SIZES, is_tied=True, layers=8))


def tall() -> nn.Module:
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(nn.Embedding(32, 16), *layers, nn.Linear(16, 32))


def check(
    parallelism: Parallelism,
    make: Callable[[], nn.Module] = untied,
    *,
    schedule: str = "1f1b",
    recompute: bool = False,
    averaged: bool = False,
    microbatches: int = 4,
) -> None:
    layout = parallelism.lay_out()
    group = layout.group("pipeline")
    stages = cut(make(), group, schedule=schedule)
    for stage in stages:
        if layout.size("tensor") > 1:
            divide(stage, layout.mesh["tensor"])
        if recompute:
            recompute_activations(blocks_of(stage))
        if layout.size("data", "shard", "context") > 1 and not averaged:
            shard(stage, layout)
    pipeline = Pipeline(stages, group, schedule=schedule, microbatches=microbatches, loss=loss_with(layout))
    named = [pair for stage in stages for pair in stage.named_parameters()]
    parameters = dict(named)
    optimizer = optimizer_of(nn.ParameterList(parameter for _, parameter in named))
    number, readers = layout.row_reader
    for step, (loss_of_one, gradients) in enumerate(reference(make)):
        # The rows as often as each reader has microbatches.
        tokens, labels = (part.repeat(microbatches, 1).chunk(readers)[number] for part in batch(step))
        optimizer.zero_grad()
        loss = pipeline.step(tokens, target=labels)
        if averaged:
            average_gradients([parameter for _, parameter in named], layout.group("data"))
        dist.all_reduce(loss, group=layout.group("data", "shard"))
        assert loss.item() / readers == pytest.approx(loss_of_one, rel=1e-5)
        for name, parameter in parameters.items():
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(found, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
        optimizer.step()
    everywhere: list[Any] = [None] * layout.size("pipeline")
    dist.all_gather_object(everywhere, list(parameters), group=group)
    assert {name for names in everywhere for name in names} == {name for name, _ in make().named_parameters()}


def loss_with(layout: RankLayout) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if logits.shape[-1] < SIZES.vocabulary:
            return cross_entropy(logits, labels, layout.group("tensor"))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss


def check_every_schedule_equals_one_process() -> None:
    for schedule in SCHEDULES:
        check(Parallelism(pipeline=-1), tall, schedule=schedule, microbatches=8)


@slow
def check_a_decoder_equals_one_process_on_every_schedule() -> None:
    for schedule in SCHEDULES:
        check(Parallelism(pipeline=-1), schedule=schedule, microbatches=8)  # as many as dualpipe-v needs


def check_a_decoder_whose_head_shares_the_embedding_equals_one_process() -> None:
    for schedule in ("1f1b", "zbv"):  # zbv has both on the first rank
        check(Parallelism(pipeline=-1), tied, schedule=schedule)


def check_a_new_pipeline_adds_to_the_gradients_that_are_there() -> None:
    layout = Parallelism(pipeline=-1).lay_out()
    group = layout.group("pipeline")
    stages = cut(tied(), group)
    tokens, labels = (part.repeat(4, 1) for part in batch(0))
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        pipeline = Pipeline(stages, group, schedule="1f1b", microbatches=4, loss=loss_with(layout))
        pipeline.step(tokens, target=labels)
        named = [pair for stage in stages for pair in stage.named_parameters()]
        found.append({name: parameter.grad.clone() for name, parameter in named})
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, 2 * found[0][name], rtol=1e-5, atol=1e-7, msg=name)


@slow
def check_a_head_that_shares_the_embedding_equals_one_process_in_further_layouts_and_models() -> None:
    for schedule in ("interleaved-1f1b", "zero-bubble"):
        check(Parallelism(pipeline=-1), tied, schedule=schedule)
    check(Parallelism(pipeline=2, tensor=2), tied, recompute=True)
    check(Parallelism(pipeline=2, shard=2), tied, schedule="interleaved-1f1b")
    check(Parallelism(pipeline=2, data=2), tied, schedule="zbv", averaged=True)
    check(Parallelism(pipeline=-1), lambda: llama(tie_word_embeddings=True))
    check(Parallelism(pipeline=2, tensor=2), lambda: llama(tie_word_embeddings=True))


@slow  # the check of pipeline and sharding cuts a Llama, too
def check_a_llama_equals_one_process() -> None:
    check(Parallelism(pipeline=-1), llama)
    check(Parallelism(pipeline=2, tensor=2), llama, recompute=True)
    check(Parallelism(pipeline=2, tensor=2), mixtral)


class Fused(nn.Module):
    """A block that computes something else when it is divided: each part has other features of either half."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.output = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = self.inner(hidden).chunk(2, -1)
        return hidden + self.output(gate.tanh() * value)


class Normed(nn.Module):
    """A block with a layer between divided ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.output = nn.Linear(16, 32), nn.LayerNorm(8), nn.Linear(32, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.output(self.norm(self.inner(hidden).unflatten(-1, (-1, 8))).flatten(-2))


def check_wrong_plans_of_tensor_parallelism_are_refused_in_stages() -> None:
    # All stages on one rank: if they were on several, the others would wait for the one that refuses.
    layout = Parallelism(tensor=-1).lay_out()
    group = layout.group("pipeline")
    plan = {"*.inner": "colwise", "*.output": "rowwise"}
    tokens, labels = (part.repeat(2, 1) for part in batch(0))
    for kind, schedule, words in (
        (Fused, "interleaved-1f1b", r"'1' computes another result\. Its forward"),
        (Normed, "interleaved-1f1b", r"'\d\.norm\.(weight|bias)' whole.*'replicated'"),
        (Normed, "zero-bubble", r"'\d\.norm\.(weight|bias)' whole.*'replicated'"),
    ):
        torch.manual_seed(4)
        stages = cut(
            nn.Sequential(nn.Embedding(32, 16), kind(), kind(), nn.Linear(16, 32)), group, schedule=schedule
        )
        for stage in stages:
            divide(stage, layout.mesh["tensor"], plan)
        if kind is Fused:
            stages = [nn.Sequential(stage) for stage in stages]  # as WholeSequences wraps them
        pipeline = Pipeline(stages, group, schedule=schedule, microbatches=8, loss=loss_with(layout))
        with pytest.raises(ParamError, match=words):
            pipeline.step(tokens, target=labels)


GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "head_dim": 8,
    "sliding_window": 5,
    "attn_implementation": "eager",
}


def check_models_whose_layers_are_not_all_alike_equal_one_process() -> None:
    """The kind of a layer's attention depends on its number; here each stage begins with another kind."""
    # The head caps logits, which the stages before it must not do.
    check(Parallelism(pipeline=2, data=2), lambda: llama(Gemma2ForCausalLM, **GEMMA), recompute=True)


@slow
def check_models_with_another_kind_of_layer_on_each_stage_equal_one_process() -> None:
    check(Parallelism(pipeline=-1), lambda: llama(Gemma3ForCausalLM, **GEMMA))


def packed(kind: type[PreTrainedModel], **changes: object) -> LanguageNetwork:
    return LanguageNetwork(llama(kind, **changes))


def check_packed_rows_of_a_language_model_equal_one_process() -> None:
    """Each stage masks the texts of a row, in layers with windows and without."""
    kinds = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 4}
    documents = torch.tensor([[0] * 5 + [1] * 11, [2] * 15 + [3]]).repeat(2, 1)
    tokens, labels = batch(0)
    whole = packed(Qwen2ForCausalLM, **kinds)
    expected = F.cross_entropy(whole(tokens, documents), labels)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for parallelism in (Parallelism(pipeline=-1), Parallelism(pipeline=2, context=2)):
        layout = parallelism.lay_out()
        group = layout.group("pipeline")
        (stage,) = cut(packed(Qwen2ForCausalLM, **kinds), group)
        stage.positions_dim = 2 if layout.rank("pipeline") + 1 == layout.size("pipeline") else 1
        called = parallelize(stage, layout, whole_outputs=True)
        pipeline = Pipeline([called], group, schedule="1f1b", microbatches=4, loss=F.cross_entropy)
        loss = pipeline.step(tokens, target=labels, documents=documents)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for name, parameter in stage.named_parameters():
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(found, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


class Peak(nn.Module):
    """Keeps the largest output that it has seen, and drops values at random."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inner(hidden).tanh()
        self.peak = torch.maximum(self.peak, hidden.detach().abs().max())
        return F.dropout(hidden, 0.5)


def check_trials_of_stages_change_neither_buffers_nor_random_numbers() -> None:
    group = Parallelism(pipeline=-1).lay_out().group("pipeline")
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(32, 16), *(Peak() for _ in range(8)), nn.Linear(16, 32))
    tokens, labels = (part.repeat(2, 1) for part in batch(0))
    for schedule in ("1f1b", "interleaved-1f1b", "zero-bubble"):
        stages = cut(copy.deepcopy(model), group, schedule=schedule)
        peaks = [layer for stage in stages for layer in stage.modules() if isinstance(layer, Peak)]
        pipeline = Pipeline(stages, group, schedule=schedule, microbatches=8, loss=cross_entropy_of)
        torch.manual_seed(7)
        pipeline.step(tokens, target=labels)
        drawn = torch.rand(1).item()
        first = [layer.peak.item() for layer in peaks]
        assert all(0 < peak < 1 for peak in first)
        for layer in peaks:
            layer.peak = torch.zeros(())
        torch.manual_seed(7)
        pipeline.step(tokens, target=labels)
        assert torch.rand(1).item() == drawn, schedule
        assert [layer.peak.item() for layer in peaks] == first, schedule


def cross_entropy_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Blocked(nn.Module):
    """A model as users write it, which can be cut wrongly in several ways."""

    pipeline_parts = (("embedding",), "blocks", ("head",))

    def __init__(
        self,
        *,
        scale: float = 1.0,
        dropout: float = 0.0,
        by_number: float = 0.0,
        kind: type[nn.ModuleList | nn.Sequential] = nn.ModuleList,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
        self.blocks = nn.Sequential(*blocks) if kind is nn.Sequential else nn.ModuleList(blocks)
        self.head = nn.Linear(16, 32)
        self.scale, self.by_number, self.dropout = scale, by_number, nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(tokens) * self.scale)
        if isinstance(self.blocks, nn.Sequential):
            return self.head(self.blocks(hidden))
        for number, block in enumerate(self.blocks):
            hidden = block(hidden) + number * self.by_number
        return self.head(hidden)


def blocked(**changes: Any) -> nn.Module:
    torch.manual_seed(4)
    return Blocked(**changes)


def check_models_that_compute_between_their_parts_are_refused() -> None:
    check(Parallelism(pipeline=-1), blocked)
    check(Parallelism(pipeline=2, data=2), lambda: blocked(kind=nn.Sequential))
    layout = Parallelism(pipeline=-1).lay_out()
    group = layout.group("pipeline")
    for changes, words in (
        ({"scale": 2.0}, "before, between or after its pipeline_parts"),
        ({"dropout": 0.5}, "before, between or after its pipeline_parts"),
        ({"by_number": 0.1}, "by the number of a block"),
    ):
        (stage,) = cut(blocked(**changes), group)
        if dist.get_rank(group) == 0:
            assert stage(batch(0)[0]).shape == (4, 16, 16)
        else:
            with pytest.raises(ParamError, match=words):
                stage(torch.rand(4, 16, 16))
            stage(torch.rand(4, 16, 16))  # the parts are still in place
    with pytest.raises(ParamError, match="GraniteForCausalLM computes something between"):
        cut(llama(GraniteForCausalLM, embedding_multiplier=3.0), group)


class Pair(nn.Module):
    """A block that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> tuple[Tensor, int]:
        return self.inner(hidden).tanh(), 3


class OfPairs(Blocked):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)[0]
        return self.head(hidden)


def check_gradients_of_several_stages_are_clipped_together() -> None:
    layout = Parallelism(pipeline=-1).lay_out()
    group = layout.group("pipeline")
    stages = cut(tied(), group, schedule="interleaved-1f1b")
    pipeline = Pipeline(stages, group, schedule="interleaved-1f1b", microbatches=4, loss=cross_entropy_of)
    tokens, labels = batch(0)
    pipeline.step(tokens, target=labels)
    ((_, gradients), *_) = reference(tied)
    whole = nn.utils.get_total_norm(gradients.values())
    torch.testing.assert_close(clip_gradients(stages, whole.item() / 2, layout), whole, rtol=1e-4, atol=0.0)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name] / 2, rtol=1e-3, atol=1e-6, msg=name)
    with pytest.raises(ParamError, match="shapes"):
        pipeline.step(tokens.repeat(2, 1), target=labels.repeat(2, 1))


def check_blocks_may_return_tuples_and_be_alone_on_a_sharded_stage() -> None:
    def make() -> nn.Module:
        torch.manual_seed(4)
        return OfPairs()

    (stage,) = cut(make(), Parallelism(pipeline=-1).lay_out().group("pipeline"))
    if dist.get_rank():
        stage(torch.rand(4, 16, 16))
    (alone,) = cut(decoder(replace(SIZES, is_tied=False)), dist.group.WORLD)
    assert not any(isinstance(block, nn.ModuleList) for block in blocks_of(alone))


def check_recomputed_activations_equal_one_process() -> None:
    check(Parallelism(pipeline=-1), recompute=True)
    check(Parallelism(pipeline=-1), tall, recompute=True, schedule="zero-bubble")


def check_pipeline_and_sharding_equal_one_process() -> None:
    check(Parallelism(pipeline=2, shard=2), lambda: llama(num_hidden_layers=2))  # one layer on each stage
    with pytest.raises(ParamError, match="splits the backward pass"):
        check(Parallelism(pipeline=2, shard=2), schedule="zbv")


@slow
def check_pipeline_and_replicas_equal_one_process() -> None:
    check(Parallelism(pipeline=2, data=2), schedule="interleaved-1f1b", recompute=True)


def check_replicas_of_a_zero_bubble_pipeline_equal_one_process() -> None:
    check(Parallelism(pipeline=2, data=2), schedule="zbv", averaged=True)


def check_blocks_are_timed_and_cut_alike_on_all_ranks() -> None:
    costs = costs_by_time(untied(), batch(0)[0], group=dist.group.WORLD)
    assert len(costs) == 8
    assert min(costs) > 0
    stages = cut(untied(), dist.group.WORLD, stage_blocks=[1, 2, 2, 3])
    assert len(list(stages[0].blocks)) == [1, 2, 2, 3][dist.get_rank()]
    everywhere: list[list[float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, costs)
    assert all(other == costs for other in everywhere)


class Detached(nn.Linear):
    """Block whose gradients end at its input."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.detach() + torch.tanh(super().forward(rows.detach()))


def check_stages_without_gradients_of_their_input_are_refused_where_the_backward_pass_is_split() -> None:
    alone, _ = dist.new_subgroups(1)
    rows = torch.ones(4, 8)

    def step(schedule: str) -> Tensor:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Detached(8, 8))
        stages = cut(model, alone, schedule=schedule)
        return Pipeline(stages, alone, schedule=schedule, microbatches=4, loss=F.mse_loss).step(
            rows, target=rows
        )

    with pytest.raises(
        ParamError, match="No gradient reaches the input of a pipeline stage: a block detaches"
    ):
        step("zbv")
    assert step("looped-bfs") > 0


def check_what_cannot_be_cut_is_refused() -> None:
    group = dist.group.WORLD
    repeated = untied()
    repeated.blocks[7] = repeated.blocks[0]
    with pytest.raises(ParamError, match=r"'blocks.0.*' and 'blocks.7.*' are one parameter"):
        cut(repeated, group)
    with pytest.raises(ParamError, match="1 blocks cannot be cut"):
        cut(decoder(replace(SIZES, is_tied=False, layers=1)), group)
    with pytest.raises(ParamError, match=r"stage_blocks is \[5, 3\].* 8 blocks .* 4 pipeline stages"):
        cut(untied(), group, stage_blocks=[5, 3])
    with pytest.raises(ParamError, match="2 costs for 8 blocks"):
        cut(untied(), group, costs=[1.0, 2.0])
    with pytest.raises(ParamError, match="at least"):
        Pipeline([nn.Linear(2, 2)], group, schedule="1f1b", microbatches=1, loss=F.mse_loss)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_checks([__name__], 4, names=chosen(request.session.items, __name__))


@pytest.mark.parametrize("check", with_marks(__name__))
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
