"""Fits whose ranks synchronize now and then, or compress gradients: rows, checkpoints and lost ranks."""

from __future__ import annotations

import copy
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch

from sparkdl.slow_links import DiLoCo, LocalSGD, PowerSGD, TopK
from sparkdl.training.callbacks import Callback
from sparkdl.training.spec import CheckpointPlan
from sparkdl.training.trainer import train
from tests.run_ranks import RankEnvironment, run_ranks
from tests.training.scenes.checkpoint_scenes import (
    VALIDATION_ROWS,
    assert_same_fit,
    interrupted_spec,
    train_from_every_checkpoint,
)
from tests.training.scenes.training_scenes import (
    Outcome,
    assert_same_weights,
    make_spec,
    train_all,
    train_in_one_process,
    write_dataset,
)
from tests.training.test_elastic import PLANNED, Fit, slow_spec, state_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sparkdl.data import ParquetDataset
    from sparkdl.training.callbacks import FitContext
    from sparkdl.training.spec import TrainingSpec

NUM_ROWS = 81  # 6 steps of 8 rows on each of 2 ranks; the last one of one row and none
TOLERANCE = 2e-6  # float32, other order of sums
PLAIN = {"optimizer": partial(torch.optim.SGD, lr=0.1), "epochs": 2}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ParquetDataset:
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS)


def every_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


CASES: dict[str, dict[str, Any]] = {
    "synchronized in each step": {**PLAIN, "synchronization": LocalSGD(every=1)},
    "a train step": {**PLAIN, "synchronization": LocalSGD(every=1), "user_step": every_step},
    "local only after the end": {"synchronization": DiLoCo(every=4, begin_after=99)},
    "all elements": {"compression": TopK(ratio=1.0)},
    "compressed only after the end": {"compression": PowerSGD(rank=1, begin_after=99)},
}
"""Fits whose updates are those of one process."""

OTHERS: dict[str, dict[str, Any]] = {
    "local": {"synchronization": LocalSGD(every=4)},
    "local with Adam": {
        "synchronization": LocalSGD(every=4, begin_after=3),
        "optimizer": partial(torch.optim.Adam, lr=0.02),
    },
    "local with weighted rows": {"synchronization": LocalSGD(every=4), "weight": "w", "max_grad_norm": 1.0},
    "local and accumulated": {"synchronization": LocalSGD(every=2), "accumulated_batches": 2},
    "outer": {"synchronization": DiLoCo(every=3, momentum=0.5)},
    "overlapped": {"synchronization": DiLoCo(every=3, momentum=0.5, overlap=True)},
    "low rank": {"compression": PowerSGD(rank=1), "model": torch.nn.Linear(4, 3)},
    "largest": {"compression": TopK(ratio=0.1)},
}
"""Fits that converge as one process does, but otherwise."""


@pytest.fixture(scope="module")
def outcomes(dataset: ParquetDataset) -> dict[str, tuple[Outcome, ...]]:
    many = {name: {"epochs": 12, **changes} for name, changes in OTHERS.items()}
    specs = [(make_spec(**changes), dataset) for changes in (CASES | many).values()]
    return dict(zip(CASES | many, zip(*run_ranks(2, train_all, specs), strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_one_process_where_all_is_averaged_in_each_step(
    outcomes: dict[str, tuple[Outcome, ...]], dataset: ParquetDataset, name: str
) -> None:
    expected = train_in_one_process(make_spec(**CASES[name]), dataset, 2)
    for outcome in outcomes[name]:
        assert_same_weights(outcome.weights, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", OTHERS)
def test_all_ranks_end_with_the_same_weights_and_history_and_have_learned(
    outcomes: dict[str, tuple[Outcome, ...]], name: str
) -> None:
    one, other = outcomes[name]
    assert_same_fit(one, other)
    assert [record.rows for record in one.history] == [NUM_ROWS] * 12
    assert one.history[-1].loss < 0.6 * one.history[0].loss


class NotesWeights(Callback):
    """Notes the weights of this rank after each step."""

    noted: ClassVar[list[np.ndarray]] = []

    def on_step_end(self, context: FitContext) -> None:
        parameters = context.module.parameters()
        NotesWeights.noted.append(torch.cat([one.detach().reshape(-1) for one in parameters]).numpy().copy())


def weights_after_steps(
    environment: RankEnvironment, spec: TrainingSpec, dataset: ParquetDataset, hosts: list[int]
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    with environment.open(name="fit", host_of_rank=hosts) as communicator:
        keep = methodcaller("whole_module")
        result = train(spec, communicator=communicator, dataset=dataset, keep=keep)
    return NotesWeights.noted, {name: value.numpy() for name, value in result.module.state_dict().items()}


def test_ranks_of_a_host_stay_equal_while_hosts_differ(dataset: ParquetDataset) -> None:
    spec = make_spec(
        synchronization=LocalSGD(every=2, begin_after=1, group="host"), callbacks=(NotesWeights(),), epochs=2
    )
    ranks = run_ranks(4, weights_after_steps, spec, dataset, [0, 0, 1, 1])
    steps = list(zip(*(noted for noted, _ in ranks), strict=True))
    assert len(steps) == 6  # three in each epoch: after the first one all average their gradients
    for number, (first, second, third, fourth) in enumerate(steps, 1):
        assert np.array_equal(first, second)
        assert np.array_equal(third, fourth)
        assert np.array_equal(first, third) == (number not in (2, 4))
    plain = make_spec(**{**PLAIN, "synchronization": LocalSGD(every=1, group="host")})
    expected = train_in_one_process(copy.deepcopy(plain), dataset, 4)
    for _, weights in run_ranks(4, weights_after_steps, plain, dataset, [0, 0, 1, 1]):
        assert_same_weights(weights, expected, atol=TOLERANCE)


RESUMED: dict[str, dict[str, Any]] = {
    "local later": {"synchronization": LocalSGD(every=3, begin_after=4), "accumulated_batches": 1},
    "overlapped": {"synchronization": DiLoCo(every=1, overlap=True), "accumulated_batches": 1},
    "low rank": {"compression": PowerSGD(rank=1)},
}
MORE_RESUMED: dict[str, dict[str, Any]] = {
    "local": {"synchronization": LocalSGD(every=2)},
    "outer": {"synchronization": DiLoCo(every=2), "accumulated_batches": 1},
    "largest": {"compression": TopK(ratio=0.1), "accumulated_batches": 1},
}


@pytest.mark.parametrize("cases", [RESUMED, pytest.param(MORE_RESUMED, marks=pytest.mark.slow)])
def test_fits_can_be_resumed_to_the_bit(tmp_path: Path, cases: dict[str, dict[str, Any]]) -> None:
    """From each checkpoint, which is taken at the first synchronization after it is due."""
    dataset = write_dataset(tmp_path / "data", NUM_ROWS + VALIDATION_ROWS)
    specs = []
    for number, changes in enumerate(cases.values()):
        plan = CheckpointPlan(url=str(tmp_path / str(number)), every_updates=2, num_kept=99)
        specs.append(interrupted_spec(dataset, tmp_path, checkpoints=plan, **changes))
    for outcomes in run_ranks(2, train_from_every_checkpoint, specs, dataset):
        for name, (whole, resumed) in zip(cases, outcomes, strict=True):
            assert len(resumed) >= 3, name
            assert any(0 < step < 6 for _, step in resumed), name
            for outcome in resumed.values():
                assert_same_fit(whole, outcome)


@pytest.mark.slow  # fits without local steps do so daily
def test_a_fit_with_local_steps_resumes_on_another_number_of_ranks(
    dataset: ParquetDataset, tmp_path: Path
) -> None:
    plan = CheckpointPlan(url=str(tmp_path))
    changes = {"synchronization": DiLoCo(every=2, momentum=0.5), "checkpoints": plan}
    run_ranks(2, train_all, [(make_spec(epochs=2, **changes), dataset)])
    for (outcome,) in run_ranks(3, train_all, [(make_spec(epochs=6, **changes), dataset)]):
        assert outcome.events == [] or outcome.events[0]["kind"] == "resumed"
        assert [record.rows for record in outcome.history] == [NUM_ROWS] * 6
        assert outcome.history[-1].loss < outcome.history[1].loss


def kill_at(*moments: tuple[int, int, int]) -> Callable[[Fit, int, dict[str, Any]], None]:
    """Kill members, each when a step of an epoch, or a later one, is reported."""
    left = list(moments)

    def act(fit: Fit, member: int, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and left:
            victim, *place = left[0]
            if victim in fit.pids and [event["epoch"], event["step"]] >= place:
                fit.kill(left.pop(0)[0])

    return act


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"synchronization": LocalSGD(every=3)}, id="local"),
        pytest.param(
            {"synchronization": DiLoCo(every=3, momentum=0.5, overlap=True)},
            id="overlapped",
            marks=pytest.mark.slow,
        ),
        pytest.param({"compression": PowerSGD(rank=1)}, id="compressed", marks=pytest.mark.slow),
    ],
)
def test_a_fit_that_loses_ranks_goes_on_from_the_last_synchronization(tmp_path: Path, changes: Any) -> None:
    dataset = write_dataset(tmp_path / "data", 403)  # 17 steps of 24 rows
    fit = Fit(kill_at((1, 1, 8), (3, 2, 5)), tmp_path, PLANNED + 2)
    spec = slow_spec(tmp_path, optimizer=partial(torch.optim.AdamW, lr=0.02), epochs=4, **changes)
    module, outcome = fit.run(tmp_path / "fit", spec, dataset)
    assert len(fit.pids) == PLANNED + 2
    assert [record.epoch for record in outcome.history] == [1, 2, 3, 4]
    # The rows of a lost rank since the last synchronization do not count in the loss.
    assert all(403 - 8 * 17 < record.rows <= 403 for record in outcome.history)
    assert [record.rows for record in outcome.history][-1] == 403
    assert outcome.history[-1].loss < 0.8 * outcome.history[0].loss
    assert all(np.isfinite(value).all() for value in state_of(module).values())


@pytest.mark.slow  # tests/training/test_elastic.py has the updates of elastic fits daily
def test_an_elastic_fit_that_synchronizes_in_each_step_makes_the_updates_of_one_that_loses_no_rank(
    tmp_path: Path,
) -> None:
    dataset = write_dataset(tmp_path / "data", 403)
    changes = {"optimizer": partial(torch.optim.SGD, lr=0.1), "synchronization": LocalSGD(every=1)}
    expected = train_in_one_process(slow_spec(tmp_path, **changes), dataset, PLANNED)
    fit = Fit(kill_at((1, 1, 5)), tmp_path, PLANNED + 1)
    module, _ = fit.run(tmp_path / "fit", slow_spec(tmp_path, **changes), dataset)
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)
