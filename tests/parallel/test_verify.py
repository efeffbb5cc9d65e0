"""Ranks that must have rows or weights alike: they begin equal, or all of them are told. On four ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.networks.decoder import Decoder
from sparkdl.parallel import sequence
from sparkdl.parallel.context import share_sequences
from sparkdl.parallel.parallelism import Parallelism
from sparkdl.parallel.parallelize import parallelize
from sparkdl.parallel.pipeline.cut import cut
from sparkdl.parallel.pipeline.pipeline import Pipeline
from sparkdl.parallel.sharding import accumulated, average_gradients
from sparkdl.parallel.tensor.divide import divide
from sparkdl.parallel.verify.sketches import differing, sketch
from sparkdl.torch.buffers import whole_tensor
from tests.checks import chosen, require, slow, with_marks
from tests.parallel.models import SIZES, batch, decoder
from tests.torch.checks import run_checks

UNTIED = replace(SIZES, is_tied=False)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def check_context_ranks_with_other_rows_or_labels_are_told() -> None:
    tell_context_ranks_of(lambda tokens, rank: tokens.roll(rank, 1))


@slow
def check_context_ranks_with_further_other_rows_are_told() -> None:
    tell_context_ranks_of(lambda tokens, rank: batch(rank)[0], lambda tokens, rank: tokens.roll(rank, 0))


def tell_context_ranks_of(*changes: Callable[[Tensor, int], Tensor]) -> None:
    rank, group, (tokens, labels) = dist.get_rank(), dist.group.WORLD, batch(0)
    layout = Parallelism(context=4, verify=True).lay_out()
    for change in changes:
        others = change(tokens, rank)
        module = parallelize(decoder(), layout, whole_outputs=True)
        loss_of(module(tokens), labels).backward()
        with pytest.raises(ParamError, match=r"context-parallel .*different inputs .*same rows"):
            module(others)
        with pytest.raises(ParamError, match=r"context-parallel .*different inputs"):
            sequence.shard(others, 1, group)
        loss = loss_of(parallelize(decoder(), layout, whole_outputs=True)(tokens), others)
        with pytest.raises(ParamError, match="same labels"):
            loss.backward()


def check_context_ranks_of_a_pipeline_with_other_rows_are_told() -> None:
    layout = Parallelism(context=2, pipeline=2).lay_out()
    tokens, labels = batch(0)
    (stage,) = cut(decoder(UNTIED), layout.group("pipeline"))
    called = parallelize(stage, layout, whole_outputs=True)
    pipeline = Pipeline([called], layout.group("pipeline"), schedule="1f1b", microbatches=4, loss=loss_of)
    with pytest.raises(ParamError, match="context-parallel"):
        pipeline.step(tokens.roll(layout.rank("context"), 0), target=labels)


def check_pipeline_ranks_with_other_rows_or_targets_are_told() -> None:
    rank, group, (tokens, labels) = dist.get_rank(), dist.group.WORLD, batch(0)
    (stage,) = cut(decoder(UNTIED), group)
    first, pipeline = (
        Pipeline([stage], group, schedule="1f1b", microbatches=4, loss=loss_of) for _ in range(2)
    )
    first.step(*([tokens] if rank < 3 else []), target=labels if rank else None)
    for inputs, target in ((tokens.roll(rank, 0), labels), (tokens, labels.roll(rank, 0))):
        with pytest.raises(ParamError, match=r"pipeline-parallel .*different inputs .*same rows"):
            pipeline.step(inputs, target=target)
    for verify in (None, True):
        pipeline = Pipeline([stage], group, schedule="1f1b", microbatches=4, loss=loss_of, verify=verify)
        pipeline.step(tokens, target=labels)
        with pytest.raises(ParamError, match="pipeline-parallel") if verify else nullcontext():
            pipeline.step(tokens.roll(rank, 0), target=labels)


def check_tensor_ranks_with_other_rows_are_told_in_the_steps_that_are_verified() -> None:
    tokens, _ = batch(0)
    others = tokens.roll(dist.get_rank() % 2, 0)
    mesh = Parallelism(tensor=2).lay_out().mesh["tensor"]
    told = pytest.raises(ParamError, match=r"tensor-parallel .*different inputs .*same rows")
    for verify, is_first_told, is_later_told in (
        (None, True, False),
        (True, True, True),
        (False, False, False),
    ):
        module = divide(decoder(), mesh, verify=verify)
        with told if is_first_told else nullcontext():
            module(others)
        module(tokens).sum().backward()
        with told if is_later_told else nullcontext():
            module(others)


def check_tensor_ranks_with_other_random_numbers_for_dropout_are_told() -> None:
    mesh = Parallelism(tensor=4).lay_out().mesh["tensor"]
    plan = {"0.0": "replicated", "0.2": "colwise", "0.4": "rowwise"}
    for dropout, told in (
        (0.5, pytest.raises(ParamError, match="same random numbers")),
        (0.0, nullcontext()),
    ):
        layers = nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
        module = divide(nn.Sequential(nn.Sequential(*layers)), mesh, plan)
        torch.manual_seed(dist.get_rank())
        with told:
            module(torch.ones(3, 8)).sum().backward()


def check_sequences_without_a_model_are_compared_in_the_first_call_or_as_asked() -> None:
    group, whole = dist.new_group(range(4)), torch.arange(8.0).view(1, 8)
    others, told = whole + dist.get_rank(), pytest.raises(ParamError, match="context-parallel")
    with told:
        sequence.shard(others, 1, group)
    sequence.shard(whole, 1, group)
    assert sequence.shard(others, 1, group).shape == (1, 2)
    with told:
        sequence.shard(others, 1, group, verify=True)
    unseen = dist.new_group(range(4))
    assert sequence.shard(others, 1, unseen, verify=False).shape == (1, 2)


def check_sequences_with_a_model_that_is_not_verified_are_not_compared() -> None:
    group, others = dist.new_group(range(4)), torch.arange(8.0).view(1, 8) + dist.get_rank()
    module = share_sequences(decoder(), group, verify=False)
    assert sequence.shard(others, 1, group).shape == (1, 2)
    del module
    assert sequence.shard(others, 1, group).shape == (1, 2)


def check_the_first_step_ends_with_the_first_gradients() -> None:
    layout = Parallelism(shard=2, tensor=2, sharding_stage=1).lay_out()
    tokens, labels = batch(0)
    module = parallelize(decoder(), layout, whole_outputs=True)
    with torch.no_grad():
        module(tokens)
    with accumulated(module):
        loss_of(module(tokens), labels).backward()
    with pytest.raises(ParamError, match="tensor-parallel"):
        module(tokens.roll(layout.rank("tensor"), 0))
    loss_of(module(tokens), labels).backward()
    module(tokens.roll(layout.rank("tensor"), 0))


def check_a_copy_of_a_model_is_not_verified() -> None:
    module = copy.deepcopy(share_sequences(decoder(), dist.group.WORLD))
    tokens, _ = batch(0)
    assert module(tokens).shape[:2] == tokens.shape


def check_sketches_tell_rows_from_rounding() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4096, 100, generator=generator) + 3.0
    one_other = rows.clone()
    one_other[100:140] += rank
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(rank))
    masks = torch.full((16, 16), -torch.inf).triu(1)
    tensors = {
        "another order": (rows.roll(rank, 0), True),
        "another order of rows of 64 tokens": (
            torch.arange(64 * 64).view(64, 64)[[rank, *range(rank), *range(rank + 1, 64)]],
            True,
        ),
        "another order in 16 bits": (rows.roll(rank, 0).bfloat16(), True),
        "some other rows": (one_other, True),
        "one other number": (torch.arange(100_000).index_fill(0, torch.tensor([70_000]), rank), True),
        "infinities elsewhere": (masks.roll(rank, 0), True),
        "equal": (rows, False),
        "equal infinities": (masks, False),
        "a scalar": (torch.tensor(2.5), False),
        "nothing": (torch.empty(0, 3), False),
        "flags": (torch.tensor([True, False]), False),
        "complex": (torch.view_as_complex(rows.view(4096, 50, 2)), False),
        "rounded": (rows * (1 + 1e-5 * noise), False),
        "rounded to 16 bits": ((rows * (1 + 1e-3 * noise)).bfloat16(), False),
    }
    found = differing([sketch(tensor) for tensor, _ in tensors.values()], group)
    assert dict(zip(tensors, found, strict=True)) == {name: wanted for name, (_, wanted) in tensors.items()}
    assert differing([sketch(torch.ones(3) * max(rank, 1)) if rank < 2 else None, None], group) == [
        False,
        False,
    ]


def check_all_ranks_begin_with_the_weights_of_the_first() -> None:
    begin_alike(Parallelism(shard=4), Parallelism(data=2, tensor=2), Parallelism(data=2, context=2))


@slow
def check_all_ranks_of_further_layouts_begin_with_the_weights_of_the_first() -> None:
    begin_alike(Parallelism(data=2, shard=2), Parallelism(tensor=4))


def begin_alike(*layouts: Parallelism) -> None:
    """Each rank draws other weights, as scripts do that set no seed."""
    tokens, labels = batch(0)
    for sizes in layouts:
        torch.manual_seed(dist.get_rank())
        module = Decoder(replace(UNTIED, key_heads=4))
        module.register_buffer("drawn", torch.rand(3))
        of_first = [copy.deepcopy(module)]
        dist.broadcast_object_list(of_first)
        called = parallelize(module, sizes.lay_out(), whole_outputs=True)
        assert torch.equal(module.drawn, of_first[0].drawn), sizes
        for (name, parameter), wanted in zip(
            module.named_parameters(), of_first[0].parameters(), strict=True
        ):
            assert torch.equal(whole_tensor(parameter.detach()), wanted), (sizes, name)
        loss_of(called(tokens), labels).backward()


def check_replicas_of_pipeline_stages_begin_with_the_weights_of_the_first() -> None:
    layout = Parallelism(data=2, pipeline=2).lay_out()
    for averaged in (True, False):
        torch.manual_seed(dist.get_rank())
        (stage,) = cut(Decoder(UNTIED), layout.group("pipeline"))
        of_first = [copy.deepcopy(list(stage.parameters()))]
        dist.broadcast_object_list(of_first, src=layout.ranks("data")[0], group=layout.group("data"))
        parallelize(stage, layout, averaged=averaged)
        for parameter, wanted in zip(stage.parameters(), of_first[0], strict=True):
            assert torch.equal(whole_tensor(parameter.detach()), wanted), averaged


def check_weights_that_nothing_made_equal_are_refused() -> None:
    group = dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ParamError, match=r"number 0, of shape \(2, 3\), differs"):
        average_gradients(layer.parameters(), group)
    tokens, labels = batch(0)
    (stage,) = cut(Decoder(replace(SIZES, is_tied=True)), group)
    pipeline = Pipeline([stage], group, schedule="1f1b", microbatches=4, loss=loss_of)
    for _ in range(2):  # a refused step has verified nothing
        with pytest.raises(ParamError, match="copies differ between pipeline stages"):
            pipeline.step(tokens, target=labels)
    average_gradients(layer.parameters(), group, verify=False)
    Pipeline([stage], group, schedule="1f1b", microbatches=4, loss=loss_of, verify=False).step(
        tokens, target=labels
    )


def check_weights_that_become_different_are_refused_where_every_step_is_verified() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    tokens, labels = batch(0)
    (stage,) = cut(Decoder(replace(SIZES, is_tied=True)), group)
    pipelines = {
        verify: Pipeline([stage], group, schedule="1f1b", microbatches=4, loss=loss_of, verify=verify)
        for verify in (None, True)
    }
    for verify, pipeline in pipelines.items():
        average_gradients(layer.parameters(), group, verify=verify)
        pipeline.step(tokens, target=labels)
    with torch.no_grad():
        for parameter in (*layer.parameters(), *stage.parameters()):
            parameter.add_(rank)
    average_gradients(layer.parameters(), group)
    pipelines[None].step(tokens, target=labels)
    with pytest.raises(ParamError, match="number 0"):
        average_gradients(layer.parameters(), group, verify=True)
    with pytest.raises(ParamError, match="copies differ"):
        pipelines[True].step(tokens, target=labels)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_checks([__name__], 4, names=chosen(request.session.items, __name__))


@pytest.mark.parametrize("check", with_marks(__name__))
def test_check_holds_on_four_ranks(check: str, outcomes: dict[str, str | None]) -> None:
    require(outcomes[check])
