"""The training loop of a rank on CUDA, without Spark, as with ``gpusPerWorker=1``."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.errors import RankError
from sparkdl.slow_links import LocalSGD
from tests.gpu.gpu_scenes import NotFiniteFromStep, needs_gpu, needs_two_gpus
from tests.run_ranks import run_ranks
from tests.training.scenes.checkpoint_scenes import (
    assert_same_fit,
    interrupted_spec,
    train_from_every_checkpoint,
)
from tests.training.scenes.training_scenes import make_spec, train_all, train_in_one_process, write_dataset

pytestmark = [pytest.mark.gpu, needs_gpu]

shared_or_own = pytest.mark.parametrize(
    "variables",
    [{"CUDA_VISIBLE_DEVICES": "0"}, pytest.param(None, marks=needs_two_gpus)],
    ids=["shared", "own"],
)
TOLERANCE = 1e-4  # float32 on other hardware: other order of sums, fused multiply-add


def assert_same_weights(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=TOLERANCE)


def test_one_rank_on_a_gpu_learns_what_the_cpu_learns(tmp_path: Path) -> None:
    spec, dataset = make_spec(device="cuda"), write_dataset(tmp_path, 37)
    expected = train_in_one_process(copy.deepcopy(spec), dataset, world_size=1)
    ((outcome,),) = run_ranks(1, train_all, [(spec, dataset)], timeout_s=120)
    assert_same_weights(outcome.weights, expected)
    assert [record.rows for record in outcome.history] == [37, 37]
    assert [event["kind"] for event in outcome.events].count("epoch") == 2


@pytest.mark.parametrize(
    ("world_size", "first", "epoch", "step"),
    [
        (1, 3, 1, 3),
        (1, 12, 2, 2),  # 37 rows in batches of 4 are 10 steps
        pytest.param(2, 2, 1, 2, marks=needs_two_gpus),
    ],
)
def test_deferred_check_names_the_first_step_whose_loss_was_not_finite(
    tmp_path: Path, world_size: int, first: int, epoch: int, step: int
) -> None:
    spec = make_spec(device="cuda", loss=NotFiniteFromStep(first), batch_size=4)
    with pytest.raises(RankError, match=f"became NaN or infinite in epoch {epoch}, step {step}"):
        run_ranks(world_size, train_all, [(spec, write_dataset(tmp_path, 37))], timeout_s=150)


@shared_or_own
def test_two_ranks_learn_on_gpus_what_one_process_learns_on_the_joined_batches(
    tmp_path: Path, variables: dict[str, str] | None
) -> None:
    spec, dataset = (
        make_spec(device="cuda"),
        write_dataset(tmp_path, 33),
    )  # rank 1 has no rows in the last step
    expected = train_in_one_process(copy.deepcopy(spec), dataset, world_size=2)
    for (outcome,) in run_ranks(2, train_all, [(spec, dataset)], timeout_s=150, variables=variables):
        assert_same_weights(outcome.weights, expected)


@shared_or_own
def test_two_ranks_that_synchronize_after_each_step_on_gpus_learn_what_one_process_learns(
    tmp_path: Path, variables: dict[str, str] | None
) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    spec = make_spec(device="cuda", optimizer=optimizer, synchronization=LocalSGD(every=1))
    dataset = write_dataset(tmp_path, 33)
    expected = train_in_one_process(copy.deepcopy(spec), dataset, world_size=2)
    for (outcome,) in run_ranks(2, train_all, [(spec, dataset)], timeout_s=150, variables=variables):
        assert_same_weights(outcome.weights, expected)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_learns_nearly_what_float32_learns(tmp_path: Path, precision: str) -> None:
    dataset = write_dataset(tmp_path, 37)
    ((whole, lower),) = run_ranks(
        1,
        train_all,
        [(make_spec(device="cuda"), dataset), (make_spec(device="cuda", precision=precision), dataset)],
        timeout_s=120,
    )
    for name, value in lower.weights.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, whole.weights[name], rtol=0, atol=0.05)
    assert any((value != whole.weights[name]).any() for name, value in lower.weights.items())


def test_fit_resumed_from_any_checkpoint_ends_with_the_same_bits(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "rows", 40)
    spec = interrupted_spec(
        dataset, tmp_path / "checkpoints", device="cuda", precision="float16", deterministic=True
    )
    ((whole, resumed),) = run_ranks(1, train_from_every_checkpoint, [spec], dataset, timeout_s=240)[0]
    assert len(resumed) >= 2
    for outcome in resumed.values():
        assert_same_fit(whole, outcome)


@shared_or_own
@pytest.mark.parametrize("initial_weights", [None, "drawn"])
@pytest.mark.parametrize("offload", [False, True])
def test_shards_on_gpus_learn_what_one_process_learns(
    tmp_path: Path, offload: bool, initial_weights: str | None, variables: dict[str, str] | None
) -> None:
    from sparkdl.parallel import Parallelism, draw_weights

    dataset = write_dataset(tmp_path, 37)
    spec = dataclasses.replace(make_spec(device="cuda"), max_grad_norm=1e6)  # never reached
    whole = copy.deepcopy(spec)
    if initial_weights is not None:
        draw_weights(whole.model, seed=spec.seed)
    expected = train_in_one_process(whole, dataset, world_size=2)
    divided = dataclasses.replace(
        spec, parallelism=Parallelism(shard=2, offload=offload), initial_weights=initial_weights
    )
    outcomes = run_ranks(2, train_all, [(divided, dataset)], timeout_s=120, variables=variables)
    assert_same_weights(outcomes[0][0].weights, expected)


def test_float8_trains_and_leaves_a_plain_module(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    dataset = write_dataset(tmp_path, 37)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    spec = make_spec(model=model, device="cuda", precision="float8")
    names = list(model.state_dict())
    ((outcome,),) = run_ranks(1, train_all, [(spec, dataset)], timeout_s=120)
    assert list(outcome.weights) == names
    assert outcome.history[-1].loss < outcome.history[0].loss
