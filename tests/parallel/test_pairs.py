"""Each kind of parallelism, each pair and some triples of them: losses and gradients equal those of one process.

Of the pairs on 4 ranks those run daily that no other module of this folder has; all sizes on 2, 4 and 8 ranks, with and
without activation checkpointing, are slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import sparkdl.torch
from sparkdl.parallel import Parallelism, Pipeline, cut, parallelize
from sparkdl.parallel.parallelism import DIMENSIONS
from sparkdl.parallel.tensor.plan import plan_of_stage, plan_with_whole_outputs
from tests.checks import Outcomes, first_failures, outcome_of, require
from tests.parallel.models import (
    SIZES,
    batch,
    decoder,
    latent,
    logits_of,
    optimizer_of,
    reference,
    with_sinks,
)
from tests.run_ranks import RankEnvironment, run_ranks

TOLERANCE = 1e-5  # float32, relative to the norm
CPU = torch.device("cpu")
ROWS = 4  # multiple of the rows of a batch: each reader and each microbatch has at least one row


def untied() -> nn.Module:
    return decoder(replace(SIZES, is_tied=False, layers=8, heads=8, key_heads=8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": untied,
    "latent attention": lambda: latent(num_hidden_layers=2),
    "attention with sinks": with_sinks,
}


def sizes_of(num_ranks: int, *, recompute: bool) -> dict[str, Parallelism]:
    """Each kind alone, each pair, and each triple of size two, where the product of sizes is the number of ranks."""
    found = {}
    wholes = {2: [(2,)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}[num_ranks]
    for numbers in wholes:
        choose = permutations if len(set(numbers)) > 1 else combinations
        for names in choose(DIMENSIONS, len(numbers)):
            given: dict[str, Any] = {"data": 1, **dict(zip(names, numbers, strict=True))}
            name = " x ".join(f"{key} {value}" for key, value in given.items() if value > 1)
            found[name] = Parallelism(**given, recompute=recompute)
    return found


def check(
    parallelism: Parallelism,
    model: str = "decoder",
    *,
    device: torch.device = CPU,
    tolerance: float = TOLERANCE,
) -> None:
    layout = parallelism.lay_out(device_type=device.type)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    module = MODELS[model]().to(device)
    if layout.size("pipeline") == 1:
        called = parallelize(module, layout, whole_outputs=True)
        parameters = dict(module.named_parameters())
        step_of: Any = None
    else:
        plan = plan_with_whole_outputs(module, layout.size("tensor"))
        stages = cut(module, layout.group("pipeline"))
        parts = [
            parallelize(stage, layout, plan=plan_of_stage(plan, stage), whole_outputs=True)
            for stage in stages
        ]
        parameters = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
        small = 2 * layout.size("pipeline")
        group = layout.group("pipeline")
        step_of = Pipeline(
            parts, group, schedule="1f1b", microbatches=small, loss=loss_of, device=device
        ).step
    optimizer = optimizer_of(nn.ParameterList(parameters.values()))
    number, readers = layout.row_reader
    for step, (loss_of_one, gradients) in enumerate(reference(MODELS[model])):
        # The batch several times: enough rows for all readers and microbatches.
        rows = (part.repeat(4 * ROWS, 1).chunk(readers)[number] for part in batch(step))
        tokens, labels = (part.to(device) for part in rows)
        optimizer.zero_grad()
        if step_of is None:
            loss = loss_of(logits_of(called, tokens), labels)
            loss.backward()
            loss = loss.detach()
        else:
            loss = step_of(tokens, target=labels)
        dist.all_reduce(loss, group=layout.group("data", "shard"))
        assert loss.item() / readers == pytest.approx(loss_of_one, rel=tolerance)
        for name, parameter in parameters.items():
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            error = (found.cpu() - gradients[name]).norm() / gradients[name].norm()
            assert error <= tolerance, f"the gradient of {name} in step {step}: {error:.1e}"
        optimizer.step()
    count = torch.tensor(len(parameters), device=device)
    dist.all_reduce(count, group=layout.group("pipeline"))
    assert count == len(list(MODELS[model]().parameters()))


def run_on_rank(
    environment: RankEnvironment, cases: dict[str, Parallelism], models: dict[str, str]
) -> Outcomes:
    torch.set_num_threads(1)
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=60.0)
        found = {
            name: outcome_of(lambda: check(case, models.get(name, "decoder")), communicator.rank)  # noqa: B023
            for name, case in cases.items()
        }
        sparkdl.torch.destroy_process_group()
    return found


def outcomes(num_ranks: int, cases: dict[str, Parallelism], models: dict[str, str] | None = None) -> Outcomes:
    return first_failures(run_ranks(num_ranks, run_on_rank, cases, models or {}, timeout_s=600.0))


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest) -> Outcomes:
    """The outcomes of the pairs that are among the collected tests of this run."""
    mine = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == NAME_OF_TEST
    }
    cases = {name: case for name, case in {**pairs_on_4(), **plans_on_4()}.items() if name in mine}
    return outcomes(4, cases, {name: name.split(",")[0] for name in plans_on_4()})


def pairs_on_4() -> dict[str, Parallelism]:
    return {name: sizes for name, sizes in sizes_of(4, recompute=False).items() if " x " in name}


def plans_on_4() -> dict[str, Parallelism]:
    """Models with plans of transformers; their styles have to hold in each part of a layout."""
    return {
        "latent attention, tensor 4": Parallelism(tensor=4, recompute=True),
        "latent attention, data 2 x tensor 2": Parallelism(data=2, tensor=2, recompute=True),
        "latent attention, shard 2 x tensor 2": Parallelism(data=1, shard=2, tensor=2, sequence=True),
        "attention with sinks, shard 2 x tensor 2": Parallelism(data=1, shard=2, tensor=2),
        "attention with sinks, tensor 2 x pipeline 2": Parallelism(data=1, tensor=2, pipeline=2),
    }


# Pipelines with shards and context parallelism are in test_pipeline.py, the other pairs with context parallelism in
# test_context.py, and the other pairs of shards in test_sharding.py.
DAILY = (
    "data 2 x pipeline 2",
    "data 2 x tensor 2",
    "context 2 x tensor 2",
    "latent attention, shard 2 x tensor 2",
    "attention with sinks, tensor 2 x pipeline 2",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DAILY else pytest.mark.slow)
        for name in (*pairs_on_4(), *plans_on_4())
    ],
)
def test_each_pair_equals_one_process(name: str, pairs: Outcomes) -> None:
    require(pairs[name])


NAME_OF_TEST = test_each_pair_equals_one_process.__name__


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_all_sizes_equal_one_process(num_ranks: int, recompute: bool) -> None:
    failed = {
        name: why
        for name, why in outcomes(num_ranks, sizes_of(num_ranks, recompute=recompute)).items()
        if why is not None
    }
    assert not failed, failed
