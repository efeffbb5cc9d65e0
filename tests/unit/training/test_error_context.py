from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkdl.collective.job import is_consequence
from sparkdl.errors import CorruptFileError, DataError, ParamError, RankLostError, TrainingError
from sparkdl.training.objective import error_context


def fail_with(error: BaseException, cause: BaseException | None = None) -> None:
    batch = {"tokens": np.zeros((8, 7), np.int64), "label": torch.zeros(8)}
    with error_context("training", rank=3, where="epoch 1, step 2", batch=batch):
        raise error from cause


def test_what_the_model_raises_is_told_with_epoch_step_rank_and_batch_and_stays_the_cause():
    error = IndexError("index out of range in self")
    with pytest.raises(TrainingError) as caught:
        fail_with(error)
    assert str(caught.value) == (
        "In epoch 1, step 2 on rank 3 training failed: IndexError: index out of range in self. "
        "The batch: tokens int64 (8, 7), label float32 (8,)."
    )
    assert caught.value.__cause__ is error
    assert error.__traceback__ is not None
    assert not is_consequence(caught.value)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RankLostError("rank 1 is gone"), None),
        (RuntimeError("could not average"), RankLostError("rank 1 is gone")),
        (DataError("rank 1 read nothing"), RankLostError("rank 1 is gone")),
        (TrainingError("The loss became nan in epoch 1, step 2 on rank 3."), None),
        (CorruptFileError("part-0 is damaged"), None),
        (MemoryError(), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_is_told_already_or_no_failure_of_the_model_passes_as_it_is(error, cause):
    with pytest.raises(type(error)) as caught:
        fail_with(error, cause)
    assert caught.value is error


@pytest.mark.parametrize("kind", [DataError, ParamError, TrainingError])
def test_what_sparkdl_says_of_functions_of_the_user_is_told_with_its_place(kind):
    error = kind("Metric 'm' failed: KeyError: 'nowhere'")
    with pytest.raises(
        kind, match="^In epoch 1, step 2 on rank 3: Metric 'm' failed: KeyError: 'nowhere'$"
    ) as caught:
        fail_with(error)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error


def test_code_that_exits_is_told_with_its_place_and_status() -> None:
    said = r"^In epoch 2, step 5 on rank 1 training failed: it called sys\.exit\(0\)\.$"
    with (
        pytest.raises(TrainingError, match=said),
        error_context("training", rank=1, where="epoch 2, step 5"),
    ):
        raise SystemExit(0)
