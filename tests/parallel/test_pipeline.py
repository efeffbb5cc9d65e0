"""Pipeline schedules, alone and with others, on four ranks: losses and gradients equal one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparkdl.errors import ParamError
from sparkdl.parallel.parallelism import Parallelism, RankLayout
from sparkdl.parallel.pipeline import SCHEDULES, Pipeline, costs_by_time, cut
from sparkdl.parallel.sharding import average_gradients, blocks_of, recompute_activations, shard
from sparkdl.parallel.tensor import cross_entropy, divide
from tests.checks import chosen, slow, with_marks
from tests.parallel.models import SIZES, batch, decoder, llama, optimizer_of, reference
from tests.torch.checks import run_checks


def untied() -> nn.Module:
    return decoder(replace(SIZES, is_tied=False, layers=8))


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
    pipeline = Pipeline(stages, group, schedule=schedule, microbatches=8, loss=loss_with(layout))
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    optimizer = optimizer_of(nn.ParameterList(parameters.values()))
    number, readers = layout.row_reader
    for step, (loss_of_one, gradients) in enumerate(reference(make)):
        # The rows eight times over: as many as there are small batches for each reader.
        tokens, labels = (part.repeat(8, 1).chunk(readers)[number] for part in batch(step))
        optimizer.zero_grad()
        loss = pipeline.step(tokens, target=labels)
        if averaged:
            average_gradients(parameters.values(), layout.group("data"))
        dist.all_reduce(loss, group=layout.group("data", "shard"))
        assert loss.item() / readers == pytest.approx(loss_of_one, rel=1e-5)
        for name, parameter in parameters.items():
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(found, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
        optimizer.step()
    counts = torch.tensor(len(parameters))
    dist.all_reduce(counts, group=group)
    assert counts == len(list(make().parameters()))


def loss_with(layout: RankLayout) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if logits.shape[-1] < SIZES.vocabulary:
            return cross_entropy(logits, labels, layout.group("tensor"))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss


def check_every_schedule_equals_one_process() -> None:
    for schedule in SCHEDULES:
        check(Parallelism(pipeline=-1), tall, schedule=schedule)


@slow
def check_a_decoder_equals_one_process_on_every_schedule() -> None:
    for schedule in SCHEDULES:
        check(Parallelism(pipeline=-1), schedule=schedule)


def check_a_llama_equals_one_process() -> None:
    check(Parallelism(pipeline=-1), llama)
    check(Parallelism(pipeline=2, tensor=2), llama, recompute=True)


def check_recomputed_activations_equal_one_process() -> None:
    check(Parallelism(pipeline=-1), recompute=True)


def check_pipeline_and_sharding_equal_one_process() -> None:
    check(Parallelism(pipeline=2, data=2), schedule="interleaved-1f1b", recompute=True)
    with pytest.raises(ParamError, match="splits the backward pass"):
        check(Parallelism(pipeline=2, shard=2), schedule="zbv")


def check_replicas_of_a_zero_bubble_pipeline_equal_one_process() -> None:
    check(Parallelism(pipeline=2, data=2), schedule="zbv", averaged=True)


def check_blocks_are_timed_and_cut_alike_on_all_ranks() -> None:
    costs = costs_by_time(untied(), batch(0)[0], group=dist.group.WORLD)
    assert len(costs) == 8
    assert min(costs) > 0
    everywhere: list[list[float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, costs)
    assert all(other == costs for other in everywhere)


def check_what_cannot_be_cut_is_refused() -> None:
    group = dist.group.WORLD
    with pytest.raises(ParamError, match="'embedding.weight' and 'head.weight' are one parameter"):
        cut(decoder(), group)
    with pytest.raises(ParamError, match="1 blocks cannot be cut"):
        cut(decoder(replace(SIZES, is_tied=False, layers=1)), group)
    with pytest.raises(ParamError, match="2 costs for 8 blocks"):
        cut(untied(), group, costs=[1.0, 2.0])
    with pytest.raises(ParamError, match="at least"):
        Pipeline([nn.Linear(2, 2)], group, schedule="1f1b", microbatches=1, loss=F.mse_loss)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_checks([__name__], 4, names=chosen(request.session.items, __name__))


@pytest.mark.parametrize("check", with_marks(__name__))
def test_pipeline(check: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[check] is None, outcomes[check]
