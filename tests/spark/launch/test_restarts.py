"""Interrupted fits: restarted automatically, run again, or refused because the checkpoints are of another fit."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.data.files.lease import hold_alone
from sparkdl.errors import (
    CheckpointError,
    CheckpointsInUseError,
    HangError,
    LaunchError,
    RankDiedError,
    RankError,
    StoreError,
    TrainingError,
)
from sparkdl.estimators import Callback
from sparkdl.launch import Restarts, Start, run_with_restarts
from sparkdl.training.checkpoint.fit_manifest import FitManifest, fit_folder
from tests.spark.estimators.estimator_examples import (
    LossThatHangsRankOneOnce,
    LossThatKillsRankOneOnce,
    LossThatSpoils,
    make_estimator,
    store_is_empty,
)

EPOCHS = 3


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def weights_of(model) -> list[np.ndarray]:
    return [parameter.detach().numpy() for parameter in model.module.parameters()]


def assert_equal_weights(one, other) -> None:
    for mine, theirs in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture(scope="module")
def undisturbed(frame, tmp_path_factory):
    """A fit that was never interrupted, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("fit")
    checkpoints = folder / "checkpoints"
    estimator = make_estimator(folder, model=make_model(), epochs=EPOCHS, checkpointDir=str(checkpoints))
    return estimator.fit(frame), checkpoints


def restarting(folder: Path, loss: nn.Module, **changes):
    """An estimator whose fit may restart once, from a checkpoint of a few steps before."""
    params = {"model": make_model(), "epochs": EPOCHS, "checkpointEverySteps": 3, "maxRestarts": 1}
    return make_estimator(folder, loss=loss, **{**params, **changes})


def fit_and_restart(estimator, frame, caplog):
    """Fit; return the model, and the log message of the only restart."""
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        model = estimator.fit(frame)
    (said,) = [record.getMessage() for record in caplog.records if "restart 1 of 1" in record.getMessage()]
    assert "continues with 2 of 2 ranks from its checkpoint at " in said
    return model, said


@pytest.mark.slow_elsewhere
def test_a_fit_whose_rank_was_killed_restarts_and_ends_with_the_same_weights(
    frame, undisturbed, tmp_path, caplog
):
    estimator = restarting(tmp_path, LossThatKillsRankOneOnce(tmp_path))
    model, said = fit_and_restart(estimator, frame, caplog)
    assert (tmp_path / "killed").exists()
    assert_equal_weights(model, undisturbed[0])
    assert [record.loss for record in model.history] == [record.loss for record in undisturbed[0].history]
    assert "Rank 1" in said
    assert "SIGKILL" in said
    assert store_is_empty(tmp_path)


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_fit_with_a_hanging_rank_resumes_from_its_checkpoint_and_ends_with_the_same_weights(
    frame, undisturbed, tmp_path, caplog
):
    estimator = restarting(tmp_path, LossThatHangsRankOneOnce(tmp_path), hangTimeoutSeconds=3.0)
    model, said = fit_and_restart(estimator, frame, caplog)
    assert (tmp_path / "hung").exists()
    assert_equal_weights(model, undisturbed[0])
    assert "Rank 1" in said
    assert "hangs, and all ranks were ended: rank 0 " in said
    (report,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "in forward" in report
    with pytest.raises(HangError, match="Rank 1 on .* hangs"):
        (tmp_path / "hung").unlink()
        estimator.setMaxRestarts(0).fit(frame)
    assert store_is_empty(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.about_executors
def test_fit_with_a_killed_executor_resumes_and_ends_with_the_same_weights(
    spark, frame, undisturbed, tmp_path, caplog
):
    driver = f"spark://CoarseGrainedScheduler@127.0.0.1:{spark.conf.get('spark.driver.port')}"
    estimator = restarting(tmp_path, LossThatKillsRankOneOnce(tmp_path, executor_of=driver))
    model, _ = fit_and_restart(estimator, frame, caplog)
    assert (tmp_path / "killed").exists()
    assert_equal_weights(model, undisturbed[0])
    assert store_is_empty(tmp_path)


@pytest.mark.any_spark_will_do
def test_finished_fit_is_returned_without_training_and_a_longer_fit_continues_from_it(
    frame, undisturbed, tmp_path, capfd
):
    model, checkpoints = undisturbed
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    params = {"model": make_model(), "checkpointDir": str(tmp_path / "checkpoints")}
    again = make_estimator(tmp_path, epochs=EPOCHS, showProgress=True, **params).fit(frame)
    said = capfd.readouterr().err
    assert "Writing the rows" in said
    assert f"All {EPOCHS} epochs are done" in said
    assert "Starting" not in said
    assert_equal_weights(again, model)
    assert again.history == model.history
    longer = make_estimator(tmp_path, epochs=EPOCHS + 1, showProgress=True, **params).fit(frame)
    assert "continuing from a checkpoint: epoch 4/4" in capfd.readouterr().err
    assert longer.history[:EPOCHS] == model.history
    assert [record.epoch for record in longer.history] == list(range(1, EPOCHS + 2))


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_a_longer_fit_has_the_weights_of_one_that_was_as_long_from_the_start(frame, undisturbed, tmp_path):
    shutil.copytree(undisturbed[1], tmp_path / "checkpoints")
    params = {"model": make_model(), "checkpointDir": str(tmp_path / "checkpoints")}
    longer = make_estimator(tmp_path, epochs=EPOCHS + 1, **params).fit(frame)
    assert longer.history[:EPOCHS] == undisturbed[0].history
    whole = make_estimator(tmp_path, epochs=EPOCHS + 1, model=make_model()).fit(frame)
    assert_equal_weights(longer, whole)


@pytest.mark.slow  # tests/training/test_checkpoints.py resumes on other ranks daily
@pytest.mark.any_spark_will_do
def test_fit_resumed_with_another_number_of_workers_ends_with_the_same_weights(frame, tmp_path):
    def estimator(folder: Path, **changes):
        return make_estimator(
            tmp_path,
            epochs=2,
            checkpointEverySteps=2,
            keepCheckpoints=99,
            checkpointDir=str(folder),
            **changes,
        )

    whole = estimator(tmp_path / "two").fit(frame)
    checkpoints = fit_folder(str(tmp_path / "two"))
    (name,) = (
        name
        for name in checkpoints.names()
        if FitManifest(**checkpoints.open(name).manifest.about).position == "epoch 2, step 3"
    )
    shutil.copytree(tmp_path / "two" / name, tmp_path / "one" / name)
    resumed = estimator(tmp_path / "one", numWorkers=1).fit(frame)
    for mine, theirs in zip(weights_of(resumed), weights_of(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)
    assert resumed.history[0] == whole.history[0]
    assert resumed.history[1].rows == whole.history[1].rows


@pytest.mark.any_spark_will_do
def test_checkpoints_of_another_model_dataset_or_setting_are_refused_before_ranks_start(
    frame, undisturbed, tmp_path, capfd
):
    _, folder = undisturbed
    names = fit_folder(str(folder)).names()
    same = {"model": make_model(), "epochs": EPOCHS, "checkpointDir": str(folder), "showProgress": True}
    capfd.readouterr()
    for changes, rows, said in (
        ({"model": nn.Linear(4, 3)}, frame, "the model's 0.weight was"),
        (
            {},
            frame.selectExpr("*").withColumn("digit", (frame.digit + 1) % 3),
            "changed: the dataset's rows",
        ),
        ({"epochs": 1}, frame, f"reached the end of epoch {EPOCHS}, and epochs is 1"),
    ):
        with pytest.raises(CheckpointError, match=said):
            make_estimator(tmp_path, **{**same, **changes}).fit(rows)
    assert "Starting" not in capfd.readouterr().err
    assert fit_folder(str(folder)).names() == names
    with hold_alone(str(folder), print), pytest.raises(CheckpointsInUseError):
        make_estimator(tmp_path, **same).fit(frame)
    file = tmp_path / "a file"
    file.touch()
    with pytest.raises(StoreError, match="Param checkpointDir cannot be used"):
        make_estimator(tmp_path, **{**same, "checkpointDir": str(file)}).fit(frame)


class RenamesTheLease(Callback):
    """Renames the driver's lease after the first epoch, as the driver does when it starts the ranks again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, context) -> None:
        if context.rank == 0 and context.epoch == 1:
            (lease,) = self.folder.glob("_alone-*")
            lease.rename(self.folder / "_alone-renamed")


@pytest.mark.any_spark_will_do
def test_ranks_that_were_replaced_write_no_checkpoint(frame, tmp_path):
    folder = tmp_path / "checkpoints"
    estimator = make_estimator(
        tmp_path, epochs=EPOCHS, checkpointDir=str(folder), callbacks=[RenamesTheLease(folder)]
    )
    with pytest.raises(RankError, match="Another fit has taken the checkpointDir") as caught:
        estimator.fit(frame)
    assert isinstance(caught.value.__cause__, CheckpointsInUseError)


@pytest.mark.any_spark_will_do
def test_exception_of_the_users_code_is_not_restarted_and_is_raised_although_its_rows_cannot_be_removed(
    frame, tmp_path, caplog, monkeypatch
):
    def fail(location):
        raise PermissionError(f"not allowed: {location.path}")

    monkeypatch.setattr("sparkdl.data.store.housekeeping.remove_folder", fail)
    loss = LossThatSpoils(tmp_path, "nothing", fails=True)
    with pytest.raises(RankError, match="ValueError: the loss failed") as caught:
        make_estimator(tmp_path, loss=loss, maxRestarts=5).fit(frame)
    assert not isinstance(caught.value, RankDiedError)
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, TrainingError)
    assert caught.value.__cause__.position == "epoch 1, step 4"
    assert isinstance(caught.value.__cause__.__cause__, ValueError)
    assert "restart" not in caplog.text
    (left,) = (tmp_path / "store").iterdir()
    assert f"The rows stay in {left}" in caplog.text


@pytest.mark.any_spark_will_do
def test_a_restart_takes_the_slots_that_are_left_but_no_fewer_than_min_workers(spark, caplog):
    tried = []

    def lose_three(start: Start) -> str:
        tried.append(start.num_ranks)
        if start.num_ranks == 3:
            raise RankDiedError("Rank 2 on there was lost", rank=2, host="there")
        return "trained"

    def restart(min_ranks: int) -> str:
        return run_with_restarts(
            lose_three,
            Restarts(max_restarts=1, min_ranks=min_ranks),
            spark=spark,
            num_ranks=3,
            where=lambda: "its checkpoint at epoch 1, step 2",
        )

    assert restart(min_ranks=1) == "trained"
    assert tried == [3, 2]
    assert "The fit continues with 2 of 3 ranks from its checkpoint" in caplog.text
    with pytest.raises(LaunchError, match="2 slots are left .*, and the fit needs 3"):
        restart(min_ranks=3)
