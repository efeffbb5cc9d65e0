"""Batches on their way to the model: without rows, and augmented for training."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sparkdl.collective.error_origin import is_consequence
from sparkdl.errors import CorruptFileError, DataError, ParamError, RankLostError, TrainingError
from sparkdl.model.heads import Head, LabelColumn
from sparkdl.training.objective import ErrorContext, Objective, StepPosition
from sparkdl.training.precision import Precision
from tests.training.scenes.training_scenes import make_spec

CPU = torch.device("cpu")
PLACES = [
    StepPosition(0, 1, 1, 0),
    StepPosition(1, 1, 1, 1),
    StepPosition(0, 2, 1, 0),
    StepPosition(0, 1, 2, 0),
]


def draw() -> list[float]:
    return [random.random(), np.random.random(), float(torch.rand(()))]


def put_draws(arrays):
    arrays["x"][:, :3] = draw()
    return arrays


def make_objective(**changes):
    return Objective(make_spec(**changes), precision=Precision("float32", CPU), device=CPU)


def make_batch():
    return {"x": np.zeros((2, 4)), "y": np.zeros(2, np.int64)}


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_random_numbers_of_augment_depend_on_seed_and_position_alone():
    found = []
    for seed in (1, 2):
        seed_all(seed)
        expected = draw()
        objective = make_objective(augment=put_draws)
        seed_all(seed)
        found.append([tuple(objective.prepare(make_batch(), position=place)["x"][0, :3]) for place in PLACES])
        assert draw() == expected
    assert found[0] == found[1]
    numbers = {number for place in found[0] for number in place}
    assert len(numbers) == 3 * len(PLACES)
    other = make_objective(augment=put_draws, seed=8).prepare(make_batch(), position=PLACES[0])
    assert tuple(other["x"][0, :3]) not in found[0]


def test_augment_gets_batches_of_training_alone_each_with_its_position():
    objective = make_objective(augment=put_draws)
    batches = (make_batch() for _ in range(2))
    found = [batch["x"][0, :3].tolist() for batch in objective.prepare_all(batches, StepPosition(0, 1, 1, 0))]
    assert found == [
        objective.prepare(make_batch(), position=place)["x"][0, :3].tolist()
        for place in (PLACES[0], PLACES[3])
    ]
    for batch in objective.prepare_all((make_batch() for _ in range(2)), PLACES[0], of_validation=True):
        assert not batch["x"].any()


def test_unknown_label_of_the_validation_is_reported_with_its_batch():
    label = LabelColumn(name="y", dtype="int64", classes=(0,))
    objective = make_objective(heads=(Head(label=label, loss=torch.nn.CrossEntropyLoss()),))
    batches = (make_batch() | {"y": np.array([0, last])} for last in (0, 1))
    prepared = objective.prepare_all(batches, StepPosition(2, 3, 1, 2), of_validation=True)
    next(prepared)
    with pytest.raises(DataError, match="on rank 2: .*'y' holds 1") as caught:
        next(prepared)
    assert caught.value.position == "epoch 3, step 2 of the validation"


@pytest.mark.parametrize("place", [None, PLACES[0]])
def test_batch_without_rows_has_no_column_that_a_device_cannot_take(place):
    """For example a column of strings, or of arrays of different lengths, which no device can hold."""
    batch = {"x": np.empty(0, object), "y": np.empty(0, np.int64)}
    objective = make_objective(augment=put_draws)
    prepared = objective.prepare(batch, position=place)
    assert objective.num_rows(prepared) == 0
    for array in prepared.values():
        assert torch.from_numpy(array).numel() == 0


def fail_with(error: BaseException, cause: BaseException | None = None) -> None:
    batch = {"tokens": np.zeros((8, 7), np.int64), "label": torch.zeros(8)}
    with ErrorContext("training", rank=3, where="epoch 1, step 2", batch=batch):
        raise error from cause


def test_errors_of_the_model_are_reported_with_position_and_batch():
    error = IndexError("index out of range in self")
    with pytest.raises(TrainingError) as caught:
        fail_with(error)
    message = str(caught.value)
    assert message.startswith("In epoch 1, step 2 on rank 3 training failed: ")
    assert "IndexError: index out of range in self. " in message
    assert "tokens int64 (8, 7), label float32 (8,)" in message
    assert caught.value.position == "epoch 1, step 2"
    assert caught.value.__cause__ is error
    assert error.__traceback__ is not None
    assert not is_consequence(caught.value)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RankLostError("rank 1 is gone"), None),
        (RuntimeError("could not average"), RankLostError("rank 1 is gone")),
        (DataError("rank 1 read nothing"), RankLostError("rank 1 is gone")),
        (TrainingError("The loss became nan in epoch 1, step 2 on rank 3.").at("epoch 1, step 2"), None),
        (CorruptFileError("part-0 is damaged"), None),
        (MemoryError(), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_errors_with_a_position_and_failures_of_others_are_unchanged(error, cause):
    with pytest.raises(type(error)) as caught:
        fail_with(error, cause)
    assert caught.value is error


@pytest.mark.parametrize("kind", [DataError, ParamError, TrainingError])
def test_errors_of_sparkdl_about_users_functions_keep_their_class(kind):
    error = kind("Metric 'm' failed")
    with pytest.raises(kind, match="^In epoch 1, step 2 on rank 3: Metric 'm' failed$") as caught:
        fail_with(error)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error


def test_exit_of_users_code_is_reported_with_position_and_status() -> None:
    with pytest.raises(TrainingError, match=r"on rank 3 .* sys\.exit\(0\)") as caught:
        fail_with(SystemExit(0))
    assert caught.value.position == "epoch 1, step 2"
